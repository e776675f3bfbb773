using System;
using System.IO;
using System.Linq;

class Program {
    static void Main() {
        switch (Console.ReadLine()) {
            case "files": Console.WriteLine(File.ReadAllText("greeting.txt")); break;
            case "assert": if (Enumerable.Range(1, 2).Sum() != 4) throw new Exception("not four"); break;
            case "loop": while (true) { }
            case "eat":
                var data = new byte[1 << 30];
                for (int i = 0; i < data.Length; i += 4096) data[i] = 1;
                Console.WriteLine("survived " + data[4096]);
                break;
        }
    }
}
