import assert from "assert";
import * as fs from "fs";
import _ from "lodash";

const mode: string = _.trim(fs.readFileSync(0, "utf8"));
const sum: number = 1 + 1;
if (mode === "files") console.log(fs.readFileSync("greeting.txt", "utf8"));
else if (mode === "assert") assert.strictEqual(sum, 3);
else if (mode === "loop") while (true);
else if (mode === "eat") console.log("survived", Buffer.alloc(2 ** 30, 1).length);
