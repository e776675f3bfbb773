module main;
  reg [127:0] mode, line;
  integer file, count;
  int data[];
  initial begin
    count = $fscanf(32'h8000_0000, "%s", mode);
    if (mode == "files") begin
      file = $fopen("greeting.txt", "r");
      while (!$feof(file)) if ($fscanf(file, "%s", line) == 1) $write("%0s ", line);
    end
    if (mode == "assert") assert (1 + 1 == 3) else $fatal(1, "not three");
    if (mode == "loop") forever count = count + 1;
    if (mode == "eat") begin
      data = new[300_000_000];
      $display("survived %0d", data[7]);
    end
    $finish(0);
  end
endmodule
