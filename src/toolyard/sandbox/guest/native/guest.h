/* What Python fills in and reads. The same fields, in the same order, stand in __init__.py, which compares sizes. */

#ifndef TOOLYARD_GUEST_H
#define TOOLYARD_GUEST_H

#include <stdint.h>

/* How cases are forked from their parent. */
struct toolyard_siblings {
    uint64_t signals;        /* to unblock, as the kernel has them: one bit each */
    uint64_t processors_size;
    const void *processors;  /* on which a case may run, as the kernel has them */
    int32_t control;         /* the socket on which the worker sends the streams of each case */
    int32_t closes_control;  /* whether a case closes it */
};

struct toolyard_stream {
    void *memory;
    uint64_t limit;          /* bytes that are kept */
    uint64_t size;           /* that were */
    uint64_t seen;           /* that came; more than `size`: not all, and the rest is still there */
    int32_t handle;
    int32_t unused;
};

struct toolyard_case {
    /* What is to be done. */
    const char *main;        /* the path of the program's text, in `work` */
    const char *work;
    const void *text;        /* to write there; NULL: the case writes it */
    uint64_t text_size;
    const void *input;
    uint64_t input_size;     /* at most PIPE_BUF */
    int64_t soon_nanoseconds; /* how long to wait for its end */
    int64_t free_inodes;     /* where no file is left */
    const void *told;        /* what the memory group's events were before */
    uint64_t told_size;
    int32_t control;         /* the socket to the parent */
    int32_t children;        /* the kernel's list of our children */
    int32_t parent;          /* its number: ours as long as we do not wait for it */
    int32_t parent_handle;   /* a pidfd, which tells when it has ended */
    int32_t events;          /* of the memory group; -1: there is none */
    /* What came of it. */
    int32_t pid;             /* of the case, if it has ended */
    int32_t status;          /* as wait() has it */
    int32_t unused;
    int64_t cpu_microseconds;
    int64_t peak_kibibytes;
    struct toolyard_stream out, err;
};

enum {
    TOOLYARD_NOT_BEGUN = 0, /* nothing is open */
    TOOLYARD_RUNNING = 1,   /* or not begun yet; the handles of `out` and `err` are open */
    TOOLYARD_ENDED = 2,     /* and waited for; the handles are open: there is more to read, or somebody else there */
    TOOLYARD_ALONE = 3,     /* and nobody else is there, all is read and closed; but something else is left */
    TOOLYARD_CLEAN = 4      /* and nothing is left */
};

int toolyard_can_fork_siblings(void);
void toolyard_fork_siblings(const struct toolyard_siblings *plan);
int toolyard_run_case(struct toolyard_case *plan);

#endif
