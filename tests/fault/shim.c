/* LD_PRELOAD for the campaigns: counts the calls that change files below one directory, and at the n-th of them kills
 * the process (before or after it), fails, or writes half.
 *
 * Which calls: open for writing, write, pwrite, close of what is open for writing, fsync, fdatasync, rename, link,
 * unlink, mkdir, ftruncate, posix_fallocate, fallocate, mmap of a file, fchmod, and madvise that populates (by its
 * address alone, so wherever). Nothing is counted before shim_arm; the process is forked from one that has not armed.
 */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_AFTER, FAIL, SHORT };
#define POPULATE_WRITE 23

static char under[4096];
static int armed, counted, at, what, error_number, lasting;
static char names[1 << 16];

void shim_arm(const char *directory, int nth, int action, int number, int for_good);
void shim_disarm(void);
int shim_counted(void);
const char *shim_names(void);

/* Begins to count. nth: from 1, 0 for none; for_good: every call from the nth on fails. */
void shim_arm(const char *directory, int nth, int action, int number, int for_good)
{
    snprintf(under, sizeof under, "%s", directory);
    counted = 0;
    names[0] = 0;
    at = nth;
    what = action;
    error_number = number;
    lasting = for_good;
    armed = 1;
}

void shim_disarm(void)
{
    armed = 0;
}

int shim_counted(void)
{
    return counted;
}

/* The calls so far, with a space after each. */
const char *shim_names(void)
{
    return names;
}

static int below(const char *path)
{
    size_t length = strlen(under);
    return strncmp(path, under, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int file_below(int fd, char *path, size_t size)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return below(path);
}

/* Counts a call; says what is to be done with it. */
static int due(const char *name)
{
    counted++;
    size_t used = strlen(names);
    snprintf(names + used, sizeof names - used, "%s ", name);
    if (at == 0 || counted < at || (counted > at && !(lasting && (what == FAIL || what == SHORT))))
        return COUNT;
    if (what == KILL_BEFORE)
        raise(SIGKILL);
    if (what == SHORT && counted > at)
        return FAIL; /* the half that went in was all that there was room for */
    return what;
}

static void after(int action)
{
    if (action == KILL_AFTER)
        raise(SIGKILL);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define REFUSE(action, value) \
    if ((action) == FAIL) { \
        errno = error_number; \
        return value; \
    }

#define ON_PATH(name, call, path, ...) \
    int action = armed && below(path) ? due(call) : COUNT; \
    REFUSE(action, -1) \
    int result = real(__VA_ARGS__); \
    after(action); \
    return result

#define ON_FILE(name, call, fd, ...) \
    char path[4096]; \
    int action = armed && file_below(fd, path, sizeof path) ? due(call) : COUNT; \
    REFUSE(action, -1) \
    int result = real(__VA_ARGS__); \
    after(action); \
    return result

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        int writes = (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY; \
        int action = armed && writes && below(path) ? due("open") : COUNT; \
        REFUSE(action, -1) \
        int result = real(path, flags, mode); \
        after(action); \
        return result; \
    }

OPEN(open)
OPEN(open64)

#define WRITE(name, call, parameters, ...) \
    ssize_t name parameters \
    { \
        REAL(name); \
        char path[4096]; \
        int action = armed && file_below(fd, path, sizeof path) ? due(call) : COUNT; \
        REFUSE(action, -1) \
        if (action == SHORT) \
            size = size > 1 ? size / 2 : size; \
        ssize_t result = real(__VA_ARGS__); \
        after(action); \
        return result; \
    }

WRITE(write, "write", (int fd, const void *data, size_t size), fd, data, size)
WRITE(pwrite, "write", (int fd, const void *data, size_t size, off_t where), fd, data, size, where)
WRITE(pwrite64, "write", (int fd, const void *data, size_t size, off64_t where), fd, data, size, where)

int fsync(int fd)
{
    REAL(fsync);
    ON_FILE(fsync, "fsync", fd, fd);
}

int fdatasync(int fd)
{
    REAL(fdatasync);
    ON_FILE(fdatasync, "fsync", fd, fd);
}

int fchmod(int fd, mode_t mode)
{
    REAL(fchmod);
    ON_FILE(fchmod, "fchmod", fd, fd, mode);
}

int ftruncate(int fd, off_t size)
{
    REAL(ftruncate);
    ON_FILE(ftruncate, "ftruncate", fd, fd, size);
}

int ftruncate64(int fd, off64_t size)
{
    REAL(ftruncate64);
    ON_FILE(ftruncate64, "ftruncate", fd, fd, size);
}

int fallocate(int fd, int mode, off_t from, off_t size)
{
    REAL(fallocate);
    ON_FILE(fallocate, "fallocate", fd, fd, mode, from, size);
}

int fallocate64(int fd, int mode, off64_t from, off64_t size)
{
    REAL(fallocate64);
    ON_FILE(fallocate64, "fallocate", fd, fd, mode, from, size);
}

/* These two return the error's number. */
#define ALLOCATE(name, type) \
    int name(int fd, type from, type size) \
    { \
        REAL(name); \
        char path[4096]; \
        int action = armed && file_below(fd, path, sizeof path) ? due("fallocate") : COUNT; \
        if (action == FAIL) \
            return error_number; \
        int result = real(fd, from, size); \
        after(action); \
        return result; \
    }

ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

#define MAP(name, type) \
    void *name(void *address, size_t size, int protection, int flags, int fd, type from) \
    { \
        REAL(name); \
        char path[4096]; \
        int action = armed && fd >= 0 && file_below(fd, path, sizeof path) ? due("mmap") : COUNT; \
        REFUSE(action, MAP_FAILED) \
        void *result = real(address, size, protection, flags, fd, from); \
        after(action); \
        return result; \
    }

MAP(mmap, off_t)
MAP(mmap64, off64_t)

int madvise(void *address, size_t size, int advice)
{
    REAL(madvise);
    int action = armed && advice == POPULATE_WRITE ? due("madvise") : COUNT;
    REFUSE(action, -1)
    int result = real(address, size, advice);
    after(action);
    return result;
}

int close(int fd)
{
    REAL(close);
    char path[4096];
    int writes = armed && file_below(fd, path, sizeof path) && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    int action = writes ? due("close") : COUNT;
    int result = real(fd); /* a close that fails has closed */
    REFUSE(action, -1)
    after(action);
    return result;
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    ON_PATH(rename, "rename", to, from, to);
}

int link(const char *from, const char *to)
{
    REAL(link);
    ON_PATH(link, "link", to, from, to);
}

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags)
{
    REAL(linkat);
    ON_PATH(linkat, "link", to, from_dir, from, to_dir, to, flags);
}

int unlink(const char *path)
{
    REAL(unlink);
    ON_PATH(unlink, "unlink", path, path);
}

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    ON_PATH(mkdir, "mkdir", path, path, mode);
}
