/* What a process changes below one folder, for libraries that are loaded with LD_PRELOAD: one
 * includes this and defines `before_change`, `write`, `pwrite64` and `writev`.
 *
 * The changes here are opening a file to write, rename, link, unlink, mkdir, rmdir, truncate, fsync
 * and copies within the kernel. System calls that do not go through libc are not seen. */
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

/* Called before each change below the folder. If it returns -1, the change fails with its errno. A
 * full disk has room for what does not `need_room`. */
static int before_change(const char *call, const char *path, int needs_room);

static char folder[PATH_MAX];

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

static int before_change_of(const char *call, int fd, int needs_room) {
    char path[PATH_MAX];
    find_path(fd, path);
    return before_change(call, path, needs_room);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    if (is_file_below(out) && before_change_of("sendfile", out, 1)) return -1;
    return NEXT(sendfile64)(out, in, offset, size);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    if (is_file_below(out) && before_change_of("copy_file_range", out, 1)) return -1;
    return NEXT(copy_file_range)(in, from, out, to, size, flags);
}

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        va_list rest;                                                                       \
        va_start(rest, flags);                                                              \
        mode_t mode = va_arg(rest, mode_t);                                                 \
        va_end(rest);                                                                       \
        int writes = (flags & O_ACCMODE) != O_RDONLY;                                       \
        if (writes && is_below(path) && before_change(#name, path, 1)) return -1;           \
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
        if (writes && is_below_at(at, path) && before_change(#name, path, 1)) return -1;    \
        return ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define ONE_PATH(name)                                               \
    int name(const char *path) {                                     \
        if (is_below(path) && before_change(#name, path, 0)) return -1; \
        return NEXT(name)(path);                                     \
    }
ONE_PATH(unlink)
ONE_PATH(rmdir)

int mkdir(const char *path, mode_t mode) {
    if (is_below(path) && before_change("mkdir", path, 1)) return -1;
    return NEXT(mkdir)(path, mode);
}

int unlinkat(int at, const char *path, int flags) {
    if (is_below_at(at, path) && before_change("unlinkat", path, 0)) return -1;
    return NEXT(unlinkat)(at, path, flags);
}

int rename(const char *from, const char *to) {
    if ((is_below(from) || is_below(to)) && before_change("rename", to, 1)) return -1;
    return NEXT(rename)(from, to);
}

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    if (is_below_at(to_at, to) && before_change("renameat2", to, 1)) return -1;
    return NEXT(renameat2)(at, from, to_at, to, flags);
}

int symlink(const char *target, const char *path) {
    if (is_below(path) && before_change("symlink", path, 1)) return -1;
    return NEXT(symlink)(target, path);
}

int link(const char *from, const char *to) {
    if (is_below(to) && before_change("link", to, 1)) return -1;
    return NEXT(link)(from, to);
}

int fsync(int fd) {
    if (is_file_below(fd) && before_change_of("fsync", fd, 1)) return -1;
    return NEXT(fsync)(fd);
}

int fdatasync(int fd) {
    if (is_file_below(fd) && before_change_of("fdatasync", fd, 1)) return -1;
    return NEXT(fdatasync)(fd);
}

int ftruncate64(int fd, off64_t size) {
    if (is_file_below(fd) && before_change_of("ftruncate", fd, 0)) return -1;
    return NEXT(ftruncate64)(fd, size);
}

int truncate64(const char *path, off64_t size) {
    if (is_below(path) && before_change("truncate", path, 0)) return -1;
    return NEXT(truncate64)(path, size);
}
