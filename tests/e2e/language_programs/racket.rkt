#lang racket
(require rackunit)
(match (read-line)
  ["files" (displayln (file->string "greeting.txt"))]
  ["assert" (check-equal? (+ 1 1) 3)]
  ["loop" (let again () (again))]
  ["eat" (printf "survived ~a" (bytes-length (make-bytes (expt 2 30) 1)))]
  [_ (void)])
