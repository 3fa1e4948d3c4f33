/*
 * A slow disk: preloaded, it makes every open, write, rename and fsync below one folder wait first.
 *
 * Build:  cc -shared -fPIC -o slow_disk.so slow_disk.c
 * Use:    LD_PRELOAD=slow_disk.so SLOW_DIR=/real/path SLOW_MS=30 SLOW_LOG=/elsewhere/log program
 *
 * Each wait leaves a line "pid call path" in SLOW_LOG. As on a real disk, a signal does not end a wait. What libc does
 * for itself (fopen, fprintf) does not come by here.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];
static char log_path[PATH_MAX];
static struct timespec slowness;

/* Once, before any thread: a program may change its environment later, while another thread opens a file. */
__attribute__((constructor)) static void configure(void)
{
    const char *dir = getenv("SLOW_DIR"), *ms = getenv("SLOW_MS"), *log = getenv("SLOW_LOG");
    if (dir && ms && log) {
        slowness.tv_sec = atol(ms) / 1000;
        slowness.tv_nsec = atol(ms) % 1000 * 1000000;
        snprintf(log_path, sizeof log_path, "%s", log);
        snprintf(folder, sizeof folder, "%s", dir);
    }
}

static int is_slow(const char *path)
{
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || path[length] == '\0');
}

static void note(const char *call, const char *path)
{
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%d %s %s\n", (int)getpid(), call, path);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        syscall(SYS_write, fd, line, (size_t)length < sizeof line ? (size_t)length : sizeof line - 1);
        syscall(SYS_close, fd);
    }
}

static void wait_for_disk(const char *call, const char *path)
{
    if (!is_slow(path))
        return;
    int before = errno;
    struct timespec left = slowness;
    note(call, path);
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
    errno = before;
}

static void wait_at(const char *call, int fd)
{
    char link[64], path[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = folder[0] ? readlink(link, path, sizeof path - 1) : -1;
    errno = before;
    if (length > 0) {
        path[length] = '\0';
        wait_for_disk(call, path);
    }
}

/* A path that is relative to a folder counts as that folder. */
static void wait_below(const char *call, int dirfd, const char *path)
{
    if (path[0] == '/' || dirfd == AT_FDCWD)
        wait_for_disk(call, path);
    else
        wait_at(call, dirfd);
}

static int open_slowly(int dirfd, const char *path, int flags, va_list rest)
{
    mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
    wait_below("open", dirfd, path);
    return (int)syscall(SYS_openat, dirfd, path, flags, mode);
}

#define OPEN(name)                                                    \
    int name(const char *path, int flags, ...)                        \
    {                                                                 \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        int fd = open_slowly(AT_FDCWD, path, flags, rest);            \
        va_end(rest);                                                 \
        return fd;                                                    \
    }
#define OPENAT(name)                                                  \
    int name(int dirfd, const char *path, int flags, ...)             \
    {                                                                 \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        int fd = open_slowly(dirfd, path, flags, rest);               \
        va_end(rest);                                                 \
        return fd;                                                    \
    }
#define PWRITE(name, offset_type)                                     \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset) \
    {                                                                 \
        wait_at("write", fd);                                         \
        return syscall(SYS_pwrite64, fd, data, size, offset);         \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t size)
{
    wait_at("write", fd);
    return syscall(SYS_write, fd, data, size);
}

int renameat(int old_dirfd, const char *old, int new_dirfd, const char *new)
{
    wait_below("rename", new_dirfd, new);
    return (int)syscall(SYS_renameat2, old_dirfd, old, new_dirfd, new, 0);
}

int rename(const char *old, const char *new)
{
    return renameat(AT_FDCWD, old, AT_FDCWD, new);
}

int fsync(int fd)
{
    wait_at("fsync", fd);
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    wait_at("fsync", fd);
    return (int)syscall(SYS_fdatasync, fd);
}
