/* Ends a process with SIGKILL, or fills its disk, at its n-th change to the files below one folder.
 *
 * Loaded with LD_PRELOAD by save_faults.py. Changes are opening a file to write, write,
 * rename, link, unlink, mkdir, rmdir, truncate and fsync. A write is cut in half before a kill, so
 * that torn files occur; every other change does not happen. On a full disk whatever needs room
 * fails with ENOSPC from the n-th change on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long last = 0;
static long events = 0;

enum { KILL, FULL, SHORT };  /* SHORT: the n-th change, if it is a write, writes half of its bytes before the disk is full */
static int fault = KILL;
static int is_full = 0;
static int needed_no_room = 0;

/* Counts changes below `path` from now on, and kills at number `at`; never if `at` is 0. */
void watch_files(const char *path, long at) {
    snprintf(folder, sizeof folder, "%s", path);
    last = at;
    fault = KILL;
    is_full = needed_no_room = 0;
    __atomic_store_n(&events, 0, __ATOMIC_SEQ_CST);
}

/* The same with a disk that becomes full at number `at`. */
void fill_disk(const char *path, long at, int is_short) {
    watch_files(path, at);
    fault = is_short ? SHORT : FULL;
}

/* Whether the disk became full, and nothing needed room since. */
int was_never_short(void) { return needed_no_room; }

long count_file_events(void) { return __atomic_load_n(&events, __ATOMIC_SEQ_CST); }

static int is_below(const char *path) { return path && folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static int is_file_below(int fd) {
    char link[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_below(path);
}

/* Whether a change below `path` is the one to die at. Sets errno and returns -1 if there is no room
 * for it. `deletes`: it needs none. */
static int decide(int deletes) {
    int is_last = __atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST) == last;
    if (fault == KILL) return is_last;
    if (is_last) is_full = needed_no_room = 1;
    if (!is_full || deletes) return 0;
    needed_no_room = 0;
    errno = ENOSPC;
    return -1;
}

static void end(const char *call, const char *path) {
    dprintf(2, "killed at change %ld: %s %s\n", last, call, path);
    raise(SIGKILL);
}

static void end_at(const char *call, int fd) {
    char link[64], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    end(call, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Half of a write: what reaches the disk before a kill, or before the disk is full. */
#define HALF_FIRST(fd, call, name, bytes)                     \
    if (is_file_below(fd)) {                                  \
        int was_full = is_full, decided = decide(0);          \
        if (decided > 0) {                                    \
            bytes;                                            \
            end_at(name, fd);                                 \
        }                                                     \
        if (decided < 0 && fault == SHORT && !was_full) {     \
            ssize_t half_size = bytes;                        \
            if (half_size > 0) return half_size;              \
            errno = ENOSPC;                                   \
        }                                                     \
        if (decided < 0) return -1;                           \
    }                                                         \
    return call;

ssize_t write(int fd, const void *data, size_t size) {
    HALF_FIRST(fd, NEXT(write)(fd, data, size), "write", NEXT(write)(fd, data, size / 2))
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    HALF_FIRST(fd, NEXT(pwrite64)(fd, data, size, offset), "pwrite", NEXT(pwrite64)(fd, data, size / 2, offset))
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    HALF_FIRST(fd, NEXT(writev)(fd, parts, count), "writev", NEXT(writev)(fd, parts, count / 2))
}

/* Ends the process, or returns -1 from the function, as `decide` says. */
#define STOP_IF(watched, deletes, end)          \
    if (watched) {                              \
        int decided = decide(deletes);          \
        if (decided > 0) end;                   \
        if (decided < 0) return -1;             \
    }

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    STOP_IF(is_file_below(out), 0, end_at("sendfile", out))
    return NEXT(sendfile64)(out, in, offset, size);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    STOP_IF(is_file_below(out), 0, end_at("copy_file_range", out))
    return NEXT(copy_file_range)(in, from, out, to, size, flags);
}

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        va_list rest;                                                                       \
        va_start(rest, flags);                                                              \
        mode_t mode = va_arg(rest, mode_t);                                                 \
        va_end(rest);                                                                       \
        STOP_IF((flags & O_ACCMODE) != O_RDONLY && is_below(path), 0, end(#name, path))     \
        return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPEN_AT(name)                                                                       \
    int name(int at, const char *path, int flags, ...) {                                    \
        va_list rest;                                                                       \
        va_start(rest, flags);                                                              \
        mode_t mode = va_arg(rest, mode_t);                                                 \
        va_end(rest);                                                                       \
        STOP_IF((flags & O_ACCMODE) != O_RDONLY && is_below(path), 0, end(#name, path))     \
        return ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define ONE_PATH(name)                                      \
    int name(const char *path) {                            \
        STOP_IF(is_below(path), 1, end(#name, path))        \
        return NEXT(name)(path);                            \
    }
ONE_PATH(unlink)
ONE_PATH(rmdir)

int mkdir(const char *path, mode_t mode) {
    STOP_IF(is_below(path), 0, end("mkdir", path))
    return NEXT(mkdir)(path, mode);
}

/* Paths relative to a folder that is open, as shutil.rmtree uses them. */
int unlinkat(int at, const char *path, int flags) {
    STOP_IF(is_below(path) || is_file_below(at), 1, end("unlinkat", path))
    return NEXT(unlinkat)(at, path, flags);
}

int rename(const char *from, const char *to) {
    STOP_IF(is_below(to), 0, end("rename", to))
    return NEXT(rename)(from, to);
}

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    STOP_IF(is_below(to) || is_file_below(to_at), 0, end("renameat2", to))
    return NEXT(renameat2)(at, from, to_at, to, flags);
}

int symlink(const char *target, const char *path) {
    STOP_IF(is_below(path), 0, end("symlink", path))
    return NEXT(symlink)(target, path);
}

int link(const char *from, const char *to) {
    STOP_IF(is_below(to), 0, end("link", to))
    return NEXT(link)(from, to);
}

int fsync(int fd) {
    STOP_IF(is_file_below(fd), 0, end_at("fsync", fd))
    return NEXT(fsync)(fd);
}

int fdatasync(int fd) {
    STOP_IF(is_file_below(fd), 0, end_at("fdatasync", fd))
    return NEXT(fdatasync)(fd);
}

int ftruncate64(int fd, off64_t size) {
    STOP_IF(is_file_below(fd), 1, end_at("ftruncate", fd))
    return NEXT(ftruncate64)(fd, size);
}

int truncate64(const char *path, off64_t size) {
    STOP_IF(is_below(path), 1, end("truncate", path))
    return NEXT(truncate64)(path, size);
}
