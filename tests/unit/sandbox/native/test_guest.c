/* Tests of guest.c, in C, so that they run under sanitizers and, by an emulator, on other processors.
 *
 * Prints a line for each test and ends with 0 if all passed. `test_guest parts` leaves out those that fork siblings,
 * which qemu-user cannot. */

#include "guest.c"

#include <stdio.h>
#include <sys/stat.h>

static int failures = 0;

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);    \
            failures++;                                                       \
        }                                                                     \
    } while (0)

static char folder[] = "/tmp/toolyard-test-XXXXXX";
static char main_path[sizeof folder + 16], list_path[64];
static char out_memory[4096], err_memory[4096];

static int open_handles(void) {
    int count = 0;
    for (int handle = 0; handle < 1024; handle++) {
        count += fcntl(handle, F_GETFD) >= 0;
    }
    return count;
}

/* ---------------------------------------------------------------------------------------------------------- parts */

static int children_in(const char *text, int *numbers) {
    int ends[2];
    char path[] = "/tmp/toolyard-list-XXXXXX";
    ends[0] = mkstemp(path);
    unlink(path);
    CHECK(write(ends[0], text, strlen(text)) == (ssize_t)strlen(text));
    int count = first_children(ends[0], numbers);
    close(ends[0]);
    return count;
}

static void test_the_list_of_children(void) {
    int numbers[2] = {0, 0};
    CHECK(children_in("", numbers) == 0);
    CHECK(children_in("17 ", numbers) == 1 && numbers[0] == 17);
    CHECK(children_in("17 4194303 ", numbers) == 2 && numbers[1] == 4194303);
    CHECK(children_in("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 ", numbers) == 2);
    CHECK(first_children(-1, numbers) == -1);
}

static void test_streams_travel(void) {
    int sockets[2], ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0 && pipe(ends) == 0);
    int before = open_handles();
    pid_t child = fork();
    if (child == 0) {
        close(sockets[0]);
        if (!receive_streams(sockets[1])) {
            _exit(1);
        }
        _exit(write(1, "hello", 5) == 5 && write(2, "!", 1) == 1 ? 0 : 2);
    }
    int status = -1;
    char text[16] = "";
    CHECK(send_streams(sockets[0], (int[]){ends[0], ends[1], ends[1]}));
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(read(ends[0], text, sizeof text) == 6 && memcmp(text, "hello!", 6) == 0);
    CHECK(open_handles() == before);
    close(sockets[1]);
    CHECK(!send_streams(sockets[0], (int[]){ends[0], ends[1], ends[1]})); /* and no SIGPIPE */
    close_all((int[]){sockets[0], ends[0], ends[1]}, 3);
}

static void test_a_message_without_streams_is_refused(void) {
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0 && write(sockets[0], "c", 1) == 1);
    CHECK(!receive_streams(sockets[1]));
    close(sockets[0]);
    CHECK(!receive_streams(sockets[1]));
    close(sockets[1]);
}

static void take_from(const char *text, uint64_t limit, uint64_t size, uint64_t seen, int whole) {
    int ends[2];
    char memory[64];
    CHECK(pipe(ends) == 0 && write(ends[1], text, strlen(text)) == (ssize_t)strlen(text));
    struct toolyard_stream stream = {.memory = memory, .limit = limit, .handle = ends[0]};
    CHECK(take(&stream) == whole);
    CHECK(stream.size == size && stream.seen == seen && memcmp(memory, text, size) == 0);
    close_all(ends, 2);
}

static void test_output_is_taken_up_to_its_limit(void) {
    take_from("", 10, 0, 0, 1);
    take_from("abc", 10, 3, 3, 1);
    take_from("abc", 3, 3, 3, 1);
    take_from("abcd", 3, 3, 4, 0);
    take_from("abcd", 0, 0, 1, 0);
}

static void test_what_is_left(void) {
    char told[] = "oom_kill 0\n";
    char events[] = "/tmp/toolyard-events-XXXXXX";
    struct statfs space;
    struct toolyard_case plan = {.main = main_path, .work = "/proc", .text = "1", .text_size = 1, .events = -1};
    CHECK(statfs(plan.work, &space) == 0);
    plan.free_inodes = (int64_t)space.f_ffree;
    CHECK(write_text(&plan) && left_nothing(&plan));
    CHECK(access(main_path, F_OK) != 0);
    CHECK(!left_nothing(&plan)); /* somebody has removed the text */
    plan.free_inodes++;
    CHECK(write_text(&plan) && !left_nothing(&plan));
    plan.free_inodes--;
    plan.events = mkstemp(events);
    unlink(events);
    CHECK(write(plan.events, told, strlen(told)) == (ssize_t)strlen(told));
    plan.told = told;
    plan.told_size = strlen(told);
    CHECK(write_text(&plan) && left_nothing(&plan));
    plan.told = "oom_kill 1\n";
    CHECK(write_text(&plan) && !left_nothing(&plan));
    plan.told_size--;
    CHECK(write_text(&plan) && !left_nothing(&plan));
    close(plan.events);
    plan.main = "/nonexistent/main.py";
    CHECK(!write_text(&plan));
}

static void test_without_a_parent_nothing_begins_and_nothing_is_left_open(void) {
    int sockets[2], before = open_handles();
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) == 0);
    close(sockets[1]);
    struct toolyard_case plan = {.main = main_path, .input = "x", .input_size = 1, .control = sockets[0]};
    CHECK(toolyard_run_case(&plan) == TOOLYARD_NOT_BEGUN);
    plan.text = "1";
    plan.text_size = 1;
    CHECK(toolyard_run_case(&plan) == TOOLYARD_NOT_BEGUN);
    plan.main = "/nonexistent/main.py";
    CHECK(toolyard_run_case(&plan) == TOOLYARD_NOT_BEGUN);
    close(sockets[0]);
    unlink(main_path);
    CHECK(open_handles() == before);
}

/* ---------------------------------------------------------------------------------------------------- whole cases */

static uint64_t processors[16];

/* What a case does is the first letter of its input. */
static void play(pid_t parent) {
    char input[64] = "";
    ssize_t size = read(0, input, sizeof input);
    switch (input[0]) {
    case 'e': /* echo, and say what it finds */
        dprintf(1, "%.*s", (int)size, input);
        dprintf(2, "%d %d", getsid(0) == getpid(), fcntl(3, F_GETFD) < 0);
        _exit(7);
    case 'm': /* much */
        for (int line = 0; line < 1000; line++) {
            dprintf(1, "%s", "0123456789");
        }
        _exit(0);
    case 's': /* slow */
        usleep(300000);
        _exit(3);
    case 'c': /* leaves a child */
        if (fork() == 0) {
            usleep(200000);
        }
        _exit(0);
    case 'p': /* ends its parent */
        kill(parent, SIGKILL);
        _exit(0);
    case 'f': /* removes the text */
        unlink(main_path);
        _exit(0);
    default:
        abort();
    }
}

static pid_t start_parent(struct toolyard_case *plan) {
    int sockets[2];
    struct toolyard_siblings siblings = {1UL << (SIGUSR1 - 1), sizeof processors, processors, 3, 1};
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
    pid_t parent = fork();
    if (parent == 0) {
        dup2(sockets[1], 3);
        for (int handle = 4; handle < 64; handle++) {
            close(handle);
        }
        pid_t me = getpid();
        toolyard_fork_siblings(&siblings);
        play(me);
    }
    close(sockets[1]);
    plan->control = sockets[0];
    plan->parent = parent;
    plan->parent_handle = (int)syscall(SYS_pidfd_open, parent, 0);
    return parent;
}

static void end_parent(struct toolyard_case *plan) {
    int status;
    close(plan->control);
    close(plan->parent_handle);
    kill(plan->parent, SIGKILL);
    while (waitpid(-1, &status, 0) > 0) {
    }
}

static int run(struct toolyard_case *plan, const char *input) {
    plan->input = input;
    plan->input_size = strlen(input);
    return toolyard_run_case(plan);
}

static void test_a_forked_process_can_fork_siblings(void) {
    int status = -1;
    pid_t child = fork(); /* as every worker is; in others, glibc 2.43 has the kernel clear something else */
    if (child == 0) {
        _exit(toolyard_can_fork_siblings() ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void test_cases(void) {
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    CHECK(syscall(SYS_sched_getaffinity, 0, sizeof processors, processors) > 0);
    struct toolyard_case plan = {
        .main = main_path, .work = "/proc", .text = "text", .text_size = 4, .events = -1,
        .soon_nanoseconds = 5000000000, .out = {.memory = out_memory, .limit = 64}, .err = {.memory = err_memory, .limit = 64}};
    struct statfs space;
    CHECK(statfs(plan.work, &space) == 0);
    plan.free_inodes = (int64_t)space.f_ffree;
    plan.children = open(list_path, O_RDONLY | O_CLOEXEC);
    CHECK(plan.children >= 0);

    start_parent(&plan);
    int before = open_handles(), status;
    for (int time = 0; time < 200; time++) {
        CHECK(run(&plan, "echo") == TOOLYARD_CLEAN);
        CHECK(WIFEXITED(plan.status) && WEXITSTATUS(plan.status) == 7 && plan.pid != plan.parent);
        CHECK(plan.out.size == 4 && memcmp(out_memory, "echo", 4) == 0);
        CHECK(plan.err.size == 3 && memcmp(err_memory, "1 1", 3) == 0);
        CHECK(plan.peak_kibibytes > 0 && plan.cpu_microseconds >= 0);
    }
    CHECK(open_handles() == before);
    CHECK(run(&plan, "file") == TOOLYARD_ALONE && open_handles() == before);

    CHECK(run(&plan, "much") == TOOLYARD_ENDED);
    CHECK(plan.out.size == 64 && plan.out.seen == 65 && plan.err.seen == 0);
    close_all((int[]){plan.out.handle, plan.err.handle}, 2);
    unlink(main_path);

    plan.soon_nanoseconds = 10000000;
    CHECK(run(&plan, "slow") == TOOLYARD_RUNNING && plan.pid == 0);
    int numbers[2];
    CHECK(first_children(plan.children, numbers) == 2 && waitpid(numbers[1], &status, 0) == numbers[1]);
    CHECK(WEXITSTATUS(status) == 3);
    close_all((int[]){plan.out.handle, plan.err.handle}, 2);
    siginfo_t pending;
    sigtimedwait(&blocked, &pending, &(struct timespec){0, 0});
    plan.soon_nanoseconds = 5000000000;

    CHECK(run(&plan, "child") == TOOLYARD_ENDED && plan.pid != 0);
    close_all((int[]){plan.out.handle, plan.err.handle}, 2);
    end_parent(&plan);
    sigtimedwait(&blocked, &pending, &(struct timespec){0, 0});

    pid_t parent = start_parent(&plan);
    int state = run(&plan, "parent"); /* the case may end before its parent has died, or the other way round */
    CHECK(state != TOOLYARD_NOT_BEGUN);
    if (state == TOOLYARD_RUNNING || state == TOOLYARD_ENDED) {
        close_all((int[]){plan.out.handle, plan.err.handle}, 2);
    }
    siginfo_t about = {0};
    usleep(50000);
    CHECK(waitid(P_PID, (id_t)parent, &about, WEXITED | WNOHANG | WNOWAIT) == 0 && about.si_pid == parent);
    CHECK(run(&plan, "echo") == TOOLYARD_NOT_BEGUN);
    end_parent(&plan);
    unlink(main_path);
    close(plan.children);
}

#define RUN(test)                                                   \
    do {                                                            \
        int before = failures;                                      \
        test();                                                     \
        printf("%s %s\n", failures == before ? "ok" : "FAILED", #test); \
        fflush(stdout);                                             \
    } while (0)

int main(int count, char **arguments) {
    CHECK(mkdtemp(folder) != NULL);
    snprintf(main_path, sizeof main_path, "%s/main.py", folder);
    snprintf(list_path, sizeof list_path, "/proc/self/task/%d/children", (int)getpid());
    RUN(test_the_list_of_children);
    RUN(test_streams_travel);
    RUN(test_a_message_without_streams_is_refused);
    RUN(test_output_is_taken_up_to_its_limit);
    RUN(test_what_is_left);
    RUN(test_without_a_parent_nothing_begins_and_nothing_is_left_open);
    if (count < 2 || strcmp(arguments[1], "parts") != 0) {
        RUN(test_a_forked_process_can_fork_siblings);
        RUN(test_cases);
    }
    unlink(main_path);
    rmdir(folder);
    return failures != 0;
}
