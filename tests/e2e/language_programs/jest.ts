import * as fs from "fs";
import _ from "lodash";

jest.mock("crypto", () => ({ randomUUID: (): string => "not random" }));
import { randomUUID } from "crypto";

const mode: string = _.trim(fs.readFileSync(0, "utf8"));

test("the mode", () => {
  if (mode === "files") {
    expect(randomUUID()).toBe("not random");
    process.stdout.write(fs.readFileSync("greeting.txt", "utf8"));
  } else if (mode === "assert") expect(1 + 1).toBe(3);
  else if (mode === "loop") while (true);
  else if (mode === "eat") process.stdout.write(`survived ${Buffer.alloc(2 ** 30, 1).length}`);
});
