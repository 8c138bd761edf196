/* Ends a process with SIGKILL, or fills its disk, at its n-th change to the files below one folder.
 *
 * Loaded with LD_PRELOAD by save_faults.py. Changes are writes and those of file_changes.h. A write
 * is cut in half before a kill, so that torn files occur; every other change does not happen. On a
 * full disk whatever needs room fails with ENOSPC from the n-th change on. */
#include "file_changes.h"

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
    char path[PATH_MAX];
    find_path(fd, path);
    end(call, path);
}

static int before_change(const char *call, const char *path, int needs_room) {
    int decided = decide(!needs_room);
    if (decided > 0) end(call, path);
    return decided < 0 ? -1 : 0;
}

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
