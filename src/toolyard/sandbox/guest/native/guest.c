/* The fast path of a batch of cases: what happens for every case, without running any Python.
 *
 * A Python program that is run on many inputs is compiled once, by a process called its parent, which is then forked
 * for every input. A forked process copies each page of memory that it writes to, and CPython writes to dozens of pages
 * between two lines, because it counts references. So the two sides of a case are functions here:
 *
 *   toolyard_fork_siblings   in the parent: waits for a case, forks it, and returns only in the fork
 *   toolyard_run_case        in the worker: starts the case, waits for a short while, collects its results
 *
 * This file does not use CPython's ABI. It is loaded with ctypes by whatever interpreter a user has chosen.
 * Every unusual case (it takes long, prints much, leaves a process or a file) is left to the Python code in
 * batch/cases.py, which does the same things one at a time.
 */

#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

enum { STREAMS = 3, LIST_BYTES = 64, EVENTS_BYTES = 256 };

#define VISIBLE __attribute__((visibility("default")))

VISIBLE const uint64_t toolyard_sizes[] = {sizeof(struct toolyard_siblings), sizeof(struct toolyard_case)};

static void close_all(const int *handles, int count) {
    for (int at = 0; at < count; at++) {
        if (handles[at] >= 0) {
            close(handles[at]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------- in the parent */

/* Like fork(), but the new process is a child of our own parent, the worker, so that the worker learns from the kernel
 * how it ended. The C library has no such function. Like its fork(), this makes the kernel write the new thread's id
 * where the C library keeps it; `tid` is that place. CLONE_VFORK: we sleep until the sibling has ended, and so share
 * its pages undisturbed. */
static long fork_sibling(int *tid) {
    const unsigned long flags = CLONE_PARENT | CLONE_VFORK | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD;
#if defined(__x86_64__)
    return syscall(SYS_clone, flags, 0L, 0L, tid, 0L);
#elif defined(__aarch64__)
    return syscall(SYS_clone, flags, 0L, 0L, 0L, tid);
#else
#error "the order of clone()'s arguments on this architecture is not known here"
#endif
}

/* Where the C library keeps this thread's id; NULL if the kernel does not say. A process that was not itself forked may
 * have told the kernel another place (glibc 2.43 does). */
static int *thread_number(void) {
    int *found = NULL;
    if (prctl(PR_GET_TID_ADDRESS, &found, 0, 0, 0) < 0 || found == NULL || *found != getpid()) {
        return NULL;
    }
    return found;
}

VISIBLE int toolyard_can_fork_siblings(void) { return thread_number() != NULL; }

/* Wait for the worker to send the standard streams of a case, and put them in place. Returns 0 if there are no more. */
static int receive_streams(int control) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(STREAMS * sizeof(int))];
    } rights;
    char byte;
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    int streams[STREAMS];
    ssize_t got;
    do {
        got = recvmsg(control, &message, 0);
    } while (got < 0 && errno == EINTR);
    if (got != 1 || message.msg_controllen < CMSG_LEN(sizeof streams)) {
        return 0;
    }
    memcpy(streams, CMSG_DATA(&rights.header), sizeof streams);
    for (int stream = 0; stream < STREAMS; stream++) {
        if (dup2(streams[stream], stream) < 0) {
            return 0;
        }
    }
    close_all(streams, STREAMS);
    return 1;
}

/* Fork a sibling for every case the worker sends. Returns in each sibling: in its own session, on all CPUs, with its
 * signals unblocked. The calling process ends here, when the worker closes its end.
 *
 * The caller must block the signals: otherwise the next sibling would handle a signal sent to the caller. */
VISIBLE void toolyard_fork_siblings(const struct toolyard_siblings *plan) {
    int *tid = thread_number();
    void *robust_list = NULL;
    size_t robust_size = 0;
    syscall(SYS_get_robust_list, 0, &robust_list, &robust_size);
    do {
        if (tid == NULL || !receive_streams(plan->control)) {
            _exit(0);
        }
    } while (fork_sibling(tid) != 0); /* its pid, or an error: the worker sees that no case started */
    setsid();
    syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &plan->signals, NULL, sizeof plan->signals);
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* lets a program read its own /proc entries */
    syscall(SYS_sched_setaffinity, 0, plan->processors_size, plan->processors);
    syscall(SYS_set_robust_list, robust_list, robust_size);
    if (plan->closes_control) {
        close(plan->control);
    }
}

/* ------------------------------------------------------------------------------------------------- in the worker */

static int write_text(const struct toolyard_case *plan) {
    int file = open(plan->main, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) {
        return 0;
    }
    ssize_t written = plan->text_size ? write(file, plan->text, plan->text_size) : 0;
    close(file);
    return written == (ssize_t)plan->text_size;
}

/* Send the case's ends of its pipes to the parent. */
static int send_streams(int control, const int *streams) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(STREAMS * sizeof(int))];
    } rights;
    memset(&rights, 0, sizeof rights);
    char byte = 'c';
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof rights};
    rights.header.cmsg_len = CMSG_LEN(STREAMS * sizeof(int));
    rights.header.cmsg_level = SOL_SOCKET;
    rights.header.cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(&rights.header), streams, STREAMS * sizeof(int));
    return sendmsg(control, &message, MSG_NOSIGNAL) == 1;
}

/* Start the case: its text, its pipes, its input. Returns 0 if it has not started; then nothing is left open. */
static int begin(struct toolyard_case *plan) {
    int input[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1};
    int begun = (plan->text == NULL || write_text(plan)) && pipe2(input, O_CLOEXEC) == 0 &&
                pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0;
    if (begun && plan->input_size) { /* at most PIPE_BUF, which always fits into a pipe */
        begun = write(input[1], plan->input, plan->input_size) == (ssize_t)plan->input_size;
    }
    begun = begun && send_streams(plan->control, (int[]){input[0], out[1], err[1]});
    close_all((int[]){input[0], input[1], out[1], err[1]}, 4);
    if (!begun) {
        close_all((int[]){out[0], err[0]}, 2);
        return 0;
    }
    plan->out.handle = out[0];
    plan->err.handle = err[0];
    return 1;
}

/* The kernel's list of the worker's children is in the order in which they became its own, including dead ones that
 * have not been reaped. The parent comes first, then the case, then processes that a case left to us. Reads the first
 * two pids; returns how many there are (2 means two or more), or -1. */
static int first_children(int list, int *numbers) {
    char text[LIST_BYTES + 1];
    ssize_t size = pread(list, text, LIST_BYTES, 0);
    if (size < 0) {
        return -1;
    }
    text[size] = '\0';
    int count = 0;
    for (char *at = text, *end; count < 2; at = end) {
        long number = strtol(at, &end, 10);
        if (end == at) {
            break;
        }
        numbers[count++] = (int)number;
    }
    return count;
}

/* Whether the case ended within `soon`. Only the case is reaped: if the parent were, its pid would be free, and a
 * process that the case left could take it (and pass for the parent). */
static int ends_soon(struct toolyard_case *plan) {
    sigset_t child_ends;
    sigemptyset(&child_ends);
    sigaddset(&child_ends, SIGCHLD);
    struct timespec until = {plan->soon_nanoseconds / 1000000000, plan->soon_nanoseconds % 1000000000};
    int numbers[2];
    if (sigtimedwait(&child_ends, NULL, &until) != SIGCHLD || first_children(plan->children, numbers) != 2 ||
        numbers[0] != plan->parent) {
        return 0;
    }
    struct rusage usage;
    int status;
    if (wait4(numbers[1], &status, WNOHANG, &usage) != numbers[1]) {
        return 0;
    }
    plan->pid = numbers[1];
    plan->status = status;
    plan->cpu_microseconds = (int64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
                             usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
    plan->peak_kibibytes = usage.ru_maxrss;
    return 1;
}

/* Read what is in a pipe. Returns whether that was everything, and no more than is kept. */
static int take(struct toolyard_stream *stream) {
    char more;
    fcntl(stream->handle, F_SETFL, O_NONBLOCK);
    ssize_t got = stream->limit ? read(stream->handle, stream->memory, stream->limit) : 0;
    stream->size = got > 0 ? (uint64_t)got : 0;
    stream->seen = stream->size;
    if (got < 0 || (uint64_t)got < stream->limit) {
        return 1; /* nothing, or a short read */
    }
    got = read(stream->handle, &more, 1);
    stream->seen += got > 0;
    return got <= 0;
}

/* Whether only the parent is left, and alive. Every process in the jail descends from a child of the worker, PID 1: if
 * the parent is its only child, there is no other. */
static int is_alone(const struct toolyard_case *plan) {
    int numbers[2];
    struct pollfd parent = {.fd = plan->parent_handle, .events = POLLIN};
    return first_children(plan->children, numbers) == 1 && numbers[0] == plan->parent && poll(&parent, 1, 0) == 0;
}

/* Whether there is nothing to clean up: no file but the text was created, and the OOM killer did not strike. */
static int left_nothing(const struct toolyard_case *plan) {
    struct statfs space;
    char told[EVENTS_BYTES];
    if (unlink(plan->main) != 0 || statfs(plan->work, &space) != 0 || (int64_t)space.f_ffree != plan->free_inodes) {
        return 0;
    }
    if (plan->events < 0) {
        return 1;
    }
    ssize_t size = pread(plan->events, told, sizeof told, 0);
    return size == (ssize_t)plan->told_size && memcmp(told, plan->told, plan->told_size) == 0;
}

/* Run a case as far as possible without complications. Returns how far it got. */
VISIBLE int toolyard_run_case(struct toolyard_case *plan) {
    plan->pid = 0;
    plan->out.size = plan->out.seen = plan->err.size = plan->err.seen = 0;
    if (!begin(plan)) {
        return TOOLYARD_NOT_BEGUN;
    }
    if (!ends_soon(plan)) {
        return TOOLYARD_RUNNING;
    }
    int whole = take(&plan->out) & take(&plan->err);
    if (!whole || !is_alone(plan)) {
        return TOOLYARD_ENDED;
    }
    close_all((int[]){plan->out.handle, plan->err.handle}, 2);
    return left_nothing(plan) ? TOOLYARD_CLEAN : TOOLYARD_ALONE;
}
