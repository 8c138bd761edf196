/* Stops a process at changes to the files below one folder.
 *
 * Loaded with LD_PRELOAD by kills.py. Changes are writes and those of file_changes.h. The process
 * stops just before a change, in the middle of a write, when half of it is written, and after it,
 * since system calls that do not go through libc are not seen: the rename with which safetensors
 * ends a file. All threads stop, so that the folder is what a kill at this moment leaves. */
#include "file_changes.h"

static long watched = 0;
static long changes = 0;

/* Counts changes below `path` from now on, and stops (SIGSTOP) at change `number`, or at each one
 * if that is 0. */
void stop_at_changes(const char *path, long number) {
    snprintf(folder, sizeof folder, "%s", path);
    watched = number;
    __atomic_store_n(&changes, 0, __ATOMIC_SEQ_CST);
}

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

static int before_change(const char *call, const char *path, int needs_room) {
    (void)needs_room;
    if (is_watched()) stop(call, path);
    return 0;
}

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
