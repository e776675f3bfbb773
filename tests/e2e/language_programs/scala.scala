import scala.io.{Source, StdIn}

object Modes {
  def main(args: Array[String]): Unit = StdIn.readLine() match {
    case "files" => println(Source.fromFile("greeting.txt").mkString)
    case "assert" => assert(1 + 1 == 3)
    case "loop" => while (true) {}
    case "eat" => println("survived " + new Array[Byte](1 << 30).length)
  }
}
