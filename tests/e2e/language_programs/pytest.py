def test_mode():
    mode = input()
    if mode == "files":
        with open("greeting.txt") as file:
            print(file.read())
    elif mode == "assert":
        assert 1 + 1 == 3
    elif mode == "loop":
        while True:
            pass
    elif mode == "eat":
        data = b"x" * (1 << 30)
        print("survived", len(data))
