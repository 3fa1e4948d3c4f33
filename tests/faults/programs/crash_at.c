/*
 * A power cut at a chosen moment: preloaded and armed, it ends the process at the n-th call that changes something below
 * one folder. A write that is hit writes half of its bytes first.
 *
 * Build:  cc -shared -fPIC -o crash_at.so crash_at.c
 * Use:    LD_PRELOAD=crash_at.so program, which calls crash_arm("/real/path", n) when it is to begin
 *
 * The process ends with code 77; crash_count() tells how many calls there have been.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[PATH_MAX];
static volatile long crash_at, count;

void crash_arm(const char *path, long at)
{
    snprintf(folder, sizeof folder, "%s", path);
    crash_at = at;
    count = 0;
}

long crash_count(void) { return count; }

static int is_below(const char *path)
{
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || path[length] == '\0');
}

static int is_hit(const char *path) { return is_below(path) && __sync_add_and_fetch(&count, 1) == crash_at; }

static int fd_is_hit(int fd)
{
    char link[64], path[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = folder[0] ? readlink(link, path, sizeof path - 1) : -1;
    errno = before;
    if (length <= 0)
        return 0;
    path[length] = '\0';
    return is_hit(path);
}

static void end(int hit)
{
    if (hit)
        syscall(SYS_exit_group, 77);
}

/* A path that is relative to a folder counts as that folder. */
static void at(int dirfd, const char *path) { end(path[0] == '/' || dirfd == AT_FDCWD ? is_hit(path) : fd_is_hit(dirfd)); }

static int open_counted(int dirfd, const char *path, int flags, va_list rest)
{
    mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, mode_t) : 0;
    if (flags & (O_CREAT | O_TRUNC))
        at(dirfd, path);
    return (int)syscall(SYS_openat, dirfd, path, flags, mode);
}

#define OPEN(name)                                                    \
    int name(const char *path, int flags, ...)                        \
    {                                                                 \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        int fd = open_counted(AT_FDCWD, path, flags, rest);           \
        va_end(rest);                                                 \
        return fd;                                                    \
    }
#define OPENAT(name)                                                  \
    int name(int dirfd, const char *path, int flags, ...)             \
    {                                                                 \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        int fd = open_counted(dirfd, path, flags, rest);              \
        va_end(rest);                                                 \
        return fd;                                                    \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size)
{
    if (fd_is_hit(fd)) {
        syscall(SYS_write, fd, data, size / 2);
        end(1);
    }
    return syscall(SYS_write, fd, data, size);
}

int mkdirat(int dirfd, const char *path, mode_t mode)
{
    at(dirfd, path);
    return (int)syscall(SYS_mkdirat, dirfd, path, mode);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int renameat(int old_dirfd, const char *old, int new_dirfd, const char *new)
{
    at(new_dirfd, new);
    return (int)syscall(SYS_renameat2, old_dirfd, old, new_dirfd, new, 0);
}

int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int linkat(int old_dirfd, const char *old, int new_dirfd, const char *new, int flags)
{
    at(new_dirfd, new);
    return (int)syscall(SYS_linkat, old_dirfd, old, new_dirfd, new, flags);
}

int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int dirfd, const char *path, int flags)
{
    at(dirfd, path);
    return (int)syscall(SYS_unlinkat, dirfd, path, flags);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int fsync(int fd)
{
    end(fd_is_hit(fd));
    return (int)syscall(SYS_fsync, fd);
}
