/* headroom.c: how much memory there is left to give to what may want it only later.
 *
 * Memory that is used is memory that is needed; memory that is populated in advance is not needed so far. So it must leave the
 * machine, and the container whose limit the kernel enforces by killing, an eighth of what they have.                        */
#include "care.h"
#include "runtime.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RESERVE = 8, PATH = 512, TEXT = 8192 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char limit_file[PATH], stat_file[PATH];              /* empty: no container that has a limit */

int softnpu_memory_group(const char *limit, const char *stat)
{
    bool fits = limit && stat && strlen(limit) < PATH && strlen(stat) < PATH;
    if (!fits)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "a path of the memory group is NULL, or has %d characters and more", PATH);
    pthread_mutex_lock(&lock);
    strcpy(limit_file, limit);
    strcpy(stat_file, stat);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

static bool read_text(const char *path, char text[TEXT])
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, TEXT - 1);
    if (fd >= 0)
        close(fd);
    text[length < 0 ? 0 : length] = 0;
    return length > 0;
}

/* The number in the line that begins with this name, or 0. */
static uint64_t line_of(const char *text, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = text; at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL)
        if (!strncmp(at, name, length))
            return strtoull(at + length, NULL, 10);
    return 0;
}

static uint64_t above(uint64_t left, uint64_t total)
{
    return left > total / RESERVE ? left - total / RESERVE : 0;
}

static uint64_t of_the_machine(char text[TEXT])
{
    if (!read_text("/proc/meminfo", text))
        return 0;
    return above(line_of(text, "MemAvailable:") * 1024, line_of(text, "MemTotal:") * 1024);
}

/* What the kernel cannot take back by dropping a page cache, under the names of both hierarchies. */
static uint64_t of_the_container(char text[TEXT])
{
    pthread_mutex_lock(&lock);
    uint64_t limit = *limit_file && read_text(limit_file, text) ? strtoull(text, NULL, 10) : 0;
    uint64_t used = 0;
    if (limit && read_text(stat_file, text))
        used = line_of(text, "anon ") + line_of(text, "shmem ") + line_of(text, "total_rss ") + line_of(text, "total_shmem ");
    pthread_mutex_unlock(&lock);
    if (!limit)
        return UINT64_MAX;
    return above(used < limit ? limit - used : 0, limit);
}

uint64_t soft_headroom(void)
{
    char text[TEXT];
    uint64_t machine = of_the_machine(text), container = of_the_container(text);
    return machine < container ? machine : container;
}
