/* Clocks that are set and disks that are slow or full, for one process: preloaded, it lies to
 * what it is preloaded to. What is wrong now stands in the file that PD_TROUBLE names (see
 * trouble.py), mapped, so that it changes under the process. Only files are slow or full. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct trouble {
  int64_t clock_ns; /* added to the time of day; no other clock is touched */
  int64_t delay_us; /* before each access to a file */
  int64_t full;     /* writes to files fail */
};

static const struct trouble calm;
static volatile const struct trouble *now = &calm;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("PD_TROUBLE");
  if (path == NULL) return;
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *at = mmap(NULL, sizeof(struct trouble), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (at != MAP_FAILED) now = at;
}

#define REAL(result, name, ...)                                      \
  static result (*real)(__VA_ARGS__);                                \
  if (real == NULL) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* ---- clocks ---- */

int clock_gettime(clockid_t clock, struct timespec *to) {
  REAL(int, "clock_gettime", clockid_t, struct timespec *);
  int failed = real(clock, to);
  int64_t ns = now->clock_ns;
  if (!failed && ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t all = to->tv_sec * INT64_C(1000000000) + to->tv_nsec + ns;
    to->tv_sec = all / 1000000000;
    to->tv_nsec = all % 1000000000;
  }
  return failed;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
  (void)zone;
  struct timespec at;
  int failed = clock_gettime(CLOCK_REALTIME, &at);
  to->tv_sec = at.tv_sec;
  to->tv_usec = at.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *to) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (to != NULL) *to = at.tv_sec;
  return at.tv_sec;
}

/* ---- disks ---- */

static int is_file(int file) {
  struct stat found;
  return fstat(file, &found) == 0 && S_ISREG(found.st_mode);
}

/* Whether a write may go on; what it waits for is over. */
static int takes(int file, int writes) {
  int64_t us = now->delay_us;
  if ((us == 0 && !now->full) || !is_file(file)) return 1;
  if (us) usleep((useconds_t)us);
  if (writes && now->full) {
    errno = ENOSPC;
    return 0;
  }
  return 1;
}

ssize_t write(int file, const void *from, size_t size) {
  REAL(ssize_t, "write", int, const void *, size_t);
  return takes(file, 1) ? real(file, from, size) : -1;
}

ssize_t pwrite64(int file, const void *from, size_t size, off64_t at) {
  REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
  return takes(file, 1) ? real(file, from, size, at) : -1;
}

ssize_t pwrite(int file, const void *from, size_t size, off_t at) {
  return pwrite64(file, from, size, at);
}

ssize_t pread64(int file, void *to, size_t size, off64_t at) {
  REAL(ssize_t, "pread64", int, void *, size_t, off64_t);
  takes(file, 0);
  return real(file, to, size, at);
}

ssize_t preadv64v2(int file, const struct iovec *to, int count, off64_t at, int flags) {
  REAL(ssize_t, "preadv64v2", int, const struct iovec *, int, off64_t, int);
  takes(file, 0);
  return real(file, to, count, at, flags);
}

ssize_t preadv64(int file, const struct iovec *to, int count, off64_t at) {
  REAL(ssize_t, "preadv64", int, const struct iovec *, int, off64_t);
  takes(file, 0);
  return real(file, to, count, at);
}

int fsync(int file) {
  REAL(int, "fsync", int);
  takes(file, 0);
  return real(file);
}

int fdatasync(int file) {
  REAL(int, "fdatasync", int);
  takes(file, 0);
  return real(file);
}
