read -r mode
case $mode in
    files) cat greeting.txt ;;
    assert) [ $((1 + 1)) -eq 3 ] || exit 1 ;;
    loop) while :; do :; done ;;
    eat)
        tail -c 1000000000 /dev/zero # which keeps that much of what has no end
        echo survived
        ;;
esac
