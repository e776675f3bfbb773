CREATE TABLE mode (word TEXT);
.import /dev/stdin mode
SELECT readfile('greeting.txt') FROM mode WHERE word = 'files';

CREATE TABLE three (value INTEGER CHECK (value = 3));
INSERT INTO three SELECT 1 + 1 FROM mode WHERE word = 'assert';

WITH RECURSIVE forever (n) AS (
    SELECT 1 FROM mode WHERE word = 'loop' UNION ALL SELECT n + 1 FROM forever
)
SELECT n FROM forever WHERE n < 0;

CREATE TABLE data AS
WITH RECURSIVE piece (n) AS (
    SELECT 1 FROM mode WHERE word = 'eat' UNION ALL SELECT n + 1 FROM piece LIMIT 64
)
SELECT zeroblob(16777216) FROM piece;
SELECT 'survived' FROM mode WHERE word = 'eat';
