#include <cassert>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

int main() {
    std::string mode, line;
    std::cin >> mode;
    if (mode == "files") {
        std::ifstream file("greeting.txt");
        std::getline(file, line);
        std::cout << line << '\n';
    } else if (mode == "assert") {
        assert(1 + 1 == 3);
    } else if (mode == "loop") {
        for (volatile int i = 0;; i = i + 1) {}
    } else if (mode == "eat") {
        std::vector<char> data(1u << 30, 'x');
        std::cout << "survived " << data[mode.size()] << '\n';
    }
}
