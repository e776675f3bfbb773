use strict;
use warnings;
use Test::Deep;
use Test::More;

chomp(my $mode = <STDIN>);
if ($mode eq 'files') {
    open my $file, '<', 'greeting.txt' or die;
    diag('read it') if cmp_deeply({ words => [1, 2] }, { words => bag(2, 1) });
    print <$file>;
} elsif ($mode eq 'assert') {
    is(1 + 1, 3);
} elsif ($mode eq 'loop') {
    while (1) { }
} elsif ($mode eq 'eat') {
    my $size = 1 << 30;
    my $data = 'x' x $size;
    print 'survived';
}
done_testing();
