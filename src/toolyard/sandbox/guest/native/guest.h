/* What Python fills in and reads. __init__.py has the same fields in the same order, and compares sizes. */

#ifndef TOOLYARD_GUEST_H
#define TOOLYARD_GUEST_H

#include <stdint.h>

/* How cases are forked from their parent. */
struct toolyard_siblings {
    uint64_t signals;        /* to unblock, as a kernel mask: one bit each */
    uint64_t processors_size;
    const void *processors;  /* on which a case may run, as a kernel mask */
    int32_t control;         /* the socket on which the worker sends each case's streams */
    int32_t closes_control;  /* whether a case closes it */
};

struct toolyard_stream {
    void *memory;
    uint64_t limit;          /* bytes to keep at most */
    uint64_t size;           /* bytes kept */
    uint64_t seen;           /* bytes read; if more than `size`, the rest is still in the pipe */
    int32_t handle;
    int32_t unused;
};

struct toolyard_case {
    /* Input. */
    const char *main;        /* the path of the program's text, in `work` */
    const char *work;
    const void *text;        /* to write there; NULL: the case writes it itself */
    uint64_t text_size;
    const void *input;
    uint64_t input_size;     /* at most PIPE_BUF */
    int64_t soon_nanoseconds; /* how long to wait for its end */
    int64_t free_inodes;     /* when no file is left */
    const void *told;        /* the memory group's events before the case */
    uint64_t told_size;
    int32_t control;         /* the socket to the parent */
    int32_t children;        /* the kernel's list of our children */
    int32_t parent;          /* its pid, which is not reused before we reap it */
    int32_t parent_handle;   /* its pidfd, which shows when it has ended */
    int32_t events;          /* file of the memory group; -1: there is none */
    /* Results. */
    int32_t pid;             /* of the case, if it has ended */
    int32_t status;          /* as returned by wait() */
    int32_t unused;
    int64_t cpu_microseconds;
    int64_t peak_kibibytes;
    struct toolyard_stream out, err;
};

enum {
    TOOLYARD_NOT_BEGUN = 0, /* nothing is open */
    TOOLYARD_RUNNING = 1,   /* or not started yet; the handles of `out` and `err` are open */
    TOOLYARD_ENDED = 2,     /* and reaped; the handles are open: more to read, or other processes exist */
    TOOLYARD_ALONE = 3,     /* ended, no other process, all read and closed; but something else is left */
    TOOLYARD_CLEAN = 4      /* like ALONE, and nothing is left */
};

int toolyard_can_fork_siblings(void);
void toolyard_fork_siblings(const struct toolyard_siblings *plan);
int toolyard_run_case(struct toolyard_case *plan);

#endif
