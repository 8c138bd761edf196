/* Ends a process with SIGKILL at its n-th change to the files below one folder.
 *
 * Loaded with LD_PRELOAD by kills.py. Changes are opening a file to write, write, rename, link,
 * unlink, mkdir, rmdir, truncate and fsync. A write is cut in half first, so that torn files occur;
 * every other change does not happen. */
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
static long last = 0;
static long events = 0;

/* Counts changes below `path` from now on, and kills at number `at`; never if `at` is 0. */
void watch_files(const char *path, long at) {
    snprintf(folder, sizeof folder, "%s", path);
    last = at;
    __atomic_store_n(&events, 0, __ATOMIC_SEQ_CST);
}

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

/* Whether this change is the last one. */
static int is_last(void) { return __atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST) == last; }

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

ssize_t write(int fd, const void *data, size_t size) {
    if (is_file_below(fd) && is_last()) {
        NEXT(write)(fd, data, size / 2);
        end_at("write", fd);
    }
    return NEXT(write)(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    if (is_file_below(fd) && is_last()) {
        NEXT(pwrite64)(fd, data, size / 2, offset);
        end_at("pwrite", fd);
    }
    return NEXT(pwrite64)(fd, data, size, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (is_file_below(fd) && is_last()) {
        NEXT(writev)(fd, parts, count / 2);
        end_at("writev", fd);
    }
    return NEXT(writev)(fd, parts, count);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    if (is_file_below(out) && is_last()) end_at("sendfile", out);
    return NEXT(sendfile64)(out, in, offset, size);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    if (is_file_below(out) && is_last()) end_at("copy_file_range", out);
    return NEXT(copy_file_range)(in, from, out, to, size, flags);
}

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        va_list rest;                                                                       \
        va_start(rest, flags);                                                              \
        mode_t mode = va_arg(rest, mode_t);                                                 \
        va_end(rest);                                                                       \
        int writes = (flags & O_ACCMODE) != O_RDONLY;                                       \
        if (writes && is_below(path) && is_last()) end(#name, path);                        \
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
        if (writes && is_below(path) && is_last()) end(#name, path);                        \
        return ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define ONE_PATH(name)                                      \
    int name(const char *path) {                            \
        if (is_below(path) && is_last()) end(#name, path);  \
        return NEXT(name)(path);                            \
    }
ONE_PATH(unlink)
ONE_PATH(rmdir)

int mkdir(const char *path, mode_t mode) {
    if (is_below(path) && is_last()) end("mkdir", path);
    return NEXT(mkdir)(path, mode);
}

/* Paths relative to a folder that is open, as shutil.rmtree uses them. */
int unlinkat(int at, const char *path, int flags) {
    if ((is_below(path) || is_file_below(at)) && is_last()) end("unlinkat", path);
    return NEXT(unlinkat)(at, path, flags);
}

int rename(const char *from, const char *to) {
    if (is_below(to) && is_last()) end("rename", to);
    return NEXT(rename)(from, to);
}

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    if ((is_below(to) || is_file_below(to_at)) && is_last()) end("renameat2", to);
    return NEXT(renameat2)(at, from, to_at, to, flags);
}

int symlink(const char *target, const char *path) {
    if (is_below(path) && is_last()) end("symlink", path);
    return NEXT(symlink)(target, path);
}

int link(const char *from, const char *to) {
    if (is_below(to) && is_last()) end("link", to);
    return NEXT(link)(from, to);
}

int fsync(int fd) {
    if (is_file_below(fd) && is_last()) end_at("fsync", fd);
    return NEXT(fsync)(fd);
}

int fdatasync(int fd) {
    if (is_file_below(fd) && is_last()) end_at("fdatasync", fd);
    return NEXT(fdatasync)(fd);
}

int ftruncate64(int fd, off64_t size) {
    if (is_file_below(fd) && is_last()) end_at("ftruncate", fd);
    return NEXT(ftruncate64)(fd, size);
}

int truncate64(const char *path, off64_t size) {
    if (is_below(path) && is_last()) end("truncate", path);
    return NEXT(truncate64)(path, size);
}
