/* Stops a process at changes to the files below one folder.
 *
 * Loaded with LD_PRELOAD by kills.py. Changes are opening a file to write, write, rename, link,
 * unlink, mkdir, rmdir, truncate and fsync. The process stops just before a change, in the middle
 * of a write, when half of it is written, and after it, since system calls that do not go through
 * libc are not seen: the rename with which safetensors ends a file. All threads stop, so that the
 * folder is what a kill at this moment leaves. */
#define _GNU_SOURCE
#include <dlfcn.h>
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
static long watched = 0;
static long changes = 0;

/* Counts changes below `path` from now on, and stops (SIGSTOP) at change `number`, or at each one
 * if that is 0. */
void stop_at_changes(const char *path, long number) {
    snprintf(folder, sizeof folder, "%s", path);
    watched = number;
    __atomic_store_n(&changes, 0, __ATOMIC_SEQ_CST);
}

/* Whether the path is the folder or in it; `run_10` is not in `run_1`. */
static int is_below(const char *path) {
    size_t length = strlen(folder);
    return path && length && strncmp(path, folder, length) == 0 && (path[length] == '/' || !path[length]);
}

static void find_path(int fd, char path[PATH_MAX]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static int is_file_below(int fd) {
    char path[PATH_MAX];
    if (!folder[0]) return 0;
    find_path(fd, path);
    return is_below(path);
}

/* `path` may be relative to the folder that is open as `at`, as in shutil.rmtree. */
static int is_below_at(int at, const char *path) { return is_below(path) || (path && *path != '/' && is_file_below(at)); }

/* Counts a change; whether to stop at it. */
static int is_watched(void) {
    long number = __atomic_add_fetch(&changes, 1, __ATOMIC_SEQ_CST);
    return !watched || number == watched;
}

static void stop(const char *call, const char *path) {
    dprintf(2, "stopped at %s %s\n", call, path);
    raise(SIGSTOP);
}

static void stop_at(const char *call, int fd) {
    char path[PATH_MAX];
    find_path(fd, path);
    stop(call, path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* The end of a write of which half was done, if that is to be stopped at. */
static ssize_t add_rest(ssize_t half, ssize_t rest, int fd) {
    if (rest < 0) return half ? half : rest;
    if (is_watched()) stop_at("end of write", fd);
    return half + rest;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!is_file_below(fd)) return NEXT(write)(fd, data, size);
    ssize_t half = 0;
    if (is_watched()) {
        if ((half = NEXT(write)(fd, data, size / 2)) < 0) return half;
        stop_at("write", fd);
    }
    return add_rest(half, NEXT(write)(fd, (const char *)data + half, size - half), fd);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    if (!is_file_below(fd)) return NEXT(pwrite64)(fd, data, size, offset);
    ssize_t half = 0;
    if (is_watched()) {
        if ((half = NEXT(pwrite64)(fd, data, size / 2, offset)) < 0) return half;
        stop_at("pwrite", fd);
    }
    return add_rest(half, NEXT(pwrite64)(fd, (const char *)data + half, size - half, offset + half), fd);
}

/* Half of the buffers; a caller handles a write that was shorter than asked for. */
ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (!is_file_below(fd) || !is_watched()) return NEXT(writev)(fd, parts, count);
    if (count < 2) {
        stop_at("writev", fd);
        return NEXT(writev)(fd, parts, count);
    }
    ssize_t half = NEXT(writev)(fd, parts, count / 2);
    stop_at("writev", fd);
    return half;
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    if (is_file_below(out) && is_watched()) stop_at("sendfile", out);
    return NEXT(sendfile64)(out, in, offset, size);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    if (is_file_below(out) && is_watched()) stop_at("copy_file_range", out);
    return NEXT(copy_file_range)(in, from, out, to, size, flags);
}

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        va_list rest;                                                                       \
        va_start(rest, flags);                                                              \
        mode_t mode = va_arg(rest, mode_t);                                                 \
        va_end(rest);                                                                       \
        int writes = (flags & O_ACCMODE) != O_RDONLY;                                       \
        if (writes && is_below(path) && is_watched()) stop(#name, path);                     \
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
        int writes = (flags & O_ACCMODE) != O_RDONLY;                                       \
        if (writes && is_below_at(at, path) && is_watched()) stop(#name, path);              \
        return ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define ONE_PATH(name)                                        \
    int name(const char *path) {                              \
        if (is_below(path) && is_watched()) stop(#name, path); \
        return NEXT(name)(path);                              \
    }
ONE_PATH(unlink)
ONE_PATH(rmdir)

int mkdir(const char *path, mode_t mode) {
    if (is_below(path) && is_watched()) stop("mkdir", path);
    return NEXT(mkdir)(path, mode);
}

int unlinkat(int at, const char *path, int flags) {
    if (is_below_at(at, path) && is_watched()) stop("unlinkat", path);
    return NEXT(unlinkat)(at, path, flags);
}

int rename(const char *from, const char *to) {
    if ((is_below(from) || is_below(to)) && is_watched()) stop("rename", to);
    return NEXT(rename)(from, to);
}

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    if (is_below_at(to_at, to) && is_watched()) stop("renameat2", to);
    return NEXT(renameat2)(at, from, to_at, to, flags);
}

int symlink(const char *target, const char *path) {
    if (is_below(path) && is_watched()) stop("symlink", path);
    return NEXT(symlink)(target, path);
}

int link(const char *from, const char *to) {
    if (is_below(to) && is_watched()) stop("link", to);
    return NEXT(link)(from, to);
}

int fsync(int fd) {
    if (is_file_below(fd) && is_watched()) stop_at("fsync", fd);
    return NEXT(fsync)(fd);
}

int fdatasync(int fd) {
    if (is_file_below(fd) && is_watched()) stop_at("fdatasync", fd);
    return NEXT(fdatasync)(fd);
}

int ftruncate64(int fd, off64_t size) {
    if (is_file_below(fd) && is_watched()) stop_at("ftruncate", fd);
    return NEXT(ftruncate64)(fd, size);
}

int truncate64(const char *path, off64_t size) {
    if (is_below(path) && is_watched()) stop("truncate", path);
    return NEXT(truncate64)(path, size);
}
