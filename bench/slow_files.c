/* A shared file system whose one server takes SLOW_NS nanoseconds for each open of a file, of all processes in turn.
   Loaded by LD_PRELOAD. SLOW_QUEUE is a file of two int64, zero at first: when the server is free, and how many opens it
   has had. Opens below /proc, /sys and /dev, of relative paths and by the dynamic linker are not slowed; nothing else is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static struct {
    _Atomic int64_t is_free, opens;
} *server;
static int64_t takes;

__attribute__((constructor)) static void set_up(void) {
    const char *queue = getenv("SLOW_QUEUE"), *ns = getenv("SLOW_NS");
    int fd = queue && ns ? openat(AT_FDCWD, queue, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *memory = mmap(NULL, sizeof *server, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return;
    takes = atoll(ns);
    server = memory;
}

static void take_turn(const char *path) {
    if (!server || !path || path[0] != '/') return;
    if (!strncmp(path, "/proc/", 6) || !strncmp(path, "/sys/", 5) || !strncmp(path, "/dev/", 5)) return;
    atomic_fetch_add(&server->opens, 1);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t begin = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec, before = atomic_load(&server->is_free), done;
    do done = (before > begin ? before : begin) + takes;
    while (!atomic_compare_exchange_weak(&server->is_free, &before, done));
    struct timespec until = {done / 1000000000, done % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {}
}

#define SLOWED(name)                                                                                                   \
    int name(const char *path, int flags, ...) {                                                                       \
        static int (*real)(const char *, int, ...);                                                                    \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                                                     \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;                                      \
        va_end(more);                                                                                                  \
        take_turn(path);                                                                                               \
        return real(path, flags, mode);                                                                                \
    }
SLOWED(open)
SLOWED(open64)

#define SLOWED_STREAM(name)                                                                                            \
    FILE *name(const char *path, const char *mode) {                                                                   \
        static FILE *(*real)(const char *, const char *);                                                              \
        if (!real) real = dlsym(RTLD_NEXT, #name);                                                                     \
        take_turn(path);                                                                                               \
        return real(path, mode);                                                                                       \
    }
SLOWED_STREAM(fopen)
SLOWED_STREAM(fopen64)
