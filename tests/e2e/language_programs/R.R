mode <- readLines(file("stdin"), n = 1)
if (mode == "files") {
  cat(readLines("greeting.txt"), sep = "\n")
} else if (mode == "assert") {
  stopifnot(1 + 1 == 3)
} else if (mode == "loop") {
  repeat {}
} else if (mode == "eat") {
  data <- rep(1, 2^27)
  cat("survived", length(data))
}
