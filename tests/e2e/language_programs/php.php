<?php
ini_set('memory_limit', '-1');
$mode = trim(fgets(STDIN));
if ($mode === 'files') {
    echo file_get_contents('greeting.txt');
} elseif ($mode === 'assert') {
    assert(1 + 1 === 3);
} elseif ($mode === 'loop') {
    while (true);
} elseif ($mode === 'eat') {
    $data = str_repeat('x', 1 << 30);
    echo 'survived';
}
