#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
    char mode[16], line[64];
    if (scanf("%15s", mode) != 1) return 1;
    if (!strcmp(mode, "files")) {
        FILE *file = fopen("greeting.txt", "r");
        puts(fgets(line, sizeof line, file));
    } else if (!strcmp(mode, "assert")) {
        assert(1 + 1 == 3);
    } else if (!strcmp(mode, "loop")) {
        for (volatile int i = 0;; i++) {}
    } else if (!strcmp(mode, "eat")) {
        char *data = malloc(1u << 30);
        memset(data, 1, 1u << 30);
        printf("survived %d\n", data[rand() % 100]);
    }
}
