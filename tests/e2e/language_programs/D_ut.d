import std.file, std.stdio, std.string;

unittest
{
    final switch (readln().strip())
    {
    case "files": writeln(readText("greeting.txt")); break;
    case "assert": assert(1 + 1 == 3); break;
    case "loop": while (true) {}
    case "eat":
        auto data = new ubyte[1 << 30];
        data[] = 1;
        writeln("survived ", data[$ - 1]);
    }
}
