import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Scanner;
import org.javatuples.Pair;

public class Modes {
    public static void main(String[] args) throws Exception {
        Pair<String, Integer> mode = Pair.with(new Scanner(System.in).next(), 3);
        switch (mode.getValue0()) {
            case "files": System.out.println(Files.readString(Path.of("greeting.txt"))); break;
            case "assert": assert 1 + 1 == mode.getValue1(); break;
            case "loop": while (true) { }
            case "eat": System.out.println("survived " + new byte[1 << 30].length);
        }
    }
}
