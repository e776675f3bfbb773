const assert = require("assert");
const fs = require("fs");
const _ = require("lodash");

const mode = _.trim(fs.readFileSync(0, "utf8"));
if (mode === "files") console.log(fs.readFileSync("greeting.txt", "utf8"));
else if (mode === "assert") assert.strictEqual(1 + 1, 3);
else if (mode === "loop") while (true);
else if (mode === "eat") console.log("survived", Buffer.alloc(2 ** 30, 1).length);
