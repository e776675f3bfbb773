case gets.chomp
when "files" then puts File.read("greeting.txt")
when "assert" then raise "not three" unless 1 + 1 == 3
when "loop" then loop {}
when "eat"
  data = "x" * (1 << 30)
  puts "survived #{data.size}"
end
