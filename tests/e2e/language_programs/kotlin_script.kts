import java.io.File

when (readLine()) {
    "files" -> println(File("greeting.txt").readText())
    "assert" -> assert(1 + 1 == 3)
    "loop" -> while (true) {}
    "eat" -> println("survived " + ByteArray(1 shl 30).size)
}
