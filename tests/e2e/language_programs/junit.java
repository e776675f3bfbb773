import static org.junit.jupiter.api.Assertions.assertEquals;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Scanner;
import org.junit.jupiter.api.Test;

public class ModesTest {
    @Test
    void mode() throws Exception {
        switch (new Scanner(System.in).next()) {
            case "files": System.out.println(Files.readString(Path.of("greeting.txt"))); break;
            case "assert": assertEquals(3, 1 + 1); break;
            case "loop": while (true) { }
            case "eat": System.out.println("survived " + new byte[1 << 30].length);
        }
    }
}
