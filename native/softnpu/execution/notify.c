/* notify.c: one-shot flags between streams, also of different processes. A notify is an eventfd: recording adds to it,
 * waiting reads it, which sets it back to zero; and a descriptor can be handed to another process. */
#include "runtime.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { MOST_PER_DEVICE = 8192, DEVICE_USE_ONLY = 0x1 };     /* the limit of A2 and A3 */

typedef struct soft_notify {
    soft_object object;
    int fd;
    soft_device *device;
    bool imported;
    pthread_mutex_t lock;
    uint64_t key;                                           /* under which it was offered, or 0 */
} soft_notify;

typedef struct notify_task { soft_task task; soft_notify *notify; int64_t timeout_ms; } notify_task;

static void destroy(soft_object *object)
{
    soft_notify *notify = (soft_notify *)object;            /* its first member */
    close(notify->fd);
    atomic_fetch_sub(&notify->device->notifies, 1);
    pthread_mutex_destroy(&notify->lock);
    free(notify);
}

static soft_notify *get(aclrtNotify handle, aclError *code)
{
    soft_notify *notify = handle ? soft_handle_get(SOFT_NOTIFY, handle) : NULL;
    *code = notify ? ACL_SUCCESS : handle ? soft_bad_handle("notify", handle) : soft_null("notify");
    return notify;
}

static aclError exhausted(void)
{
    return soft_error(ACL_ERROR_RT_NO_NOTIFY_RESOURCE, "no more notifies: a device has %d, and each takes a file descriptor "
                      "(RLIMIT_NOFILE)", MOST_PER_DEVICE);
}

static aclError new_notify(int fd, bool imported, aclrtNotify *out)       /* takes the fd over */
{
    soft_device *device;
    soft_notify *notify = calloc(1, sizeof *notify);
    aclError code = soft_device_current(&device);
    if (code || !notify || fd < 0) {
        free(notify);
        if (fd >= 0)
            close(fd);
        return code ? code : exhausted();
    }
    *notify = (soft_notify){ .object = { 1, destroy }, .fd = fd, .device = device, .imported = imported };
    pthread_mutex_init(&notify->lock, NULL);
    bool room = atomic_fetch_add(&device->notifies, 1) < MOST_PER_DEVICE;
    void *handle = room ? soft_handle_new(SOFT_NOTIFY, &notify->object) : NULL;
    if (!handle) {
        soft_unref(&notify->object);
        return exhausted();
    }
    *out = handle;
    return ACL_SUCCESS;
}

aclError aclrtCreateNotify(aclrtNotify *notify, uint64_t flag)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!notify)
        return soft_null("notify");
    SOFT_TRY(soft_flags_check(flag, DEVICE_USE_ONLY));
    SOFT_TRY(soft_context_need());
    return new_notify(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), false, notify);
}

aclError aclrtDestroyNotify(aclrtNotify notify)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!notify)
        return soft_null("notify");
    SOFT_TRY(soft_context_need());
    soft_notify *found = soft_handle_remove(SOFT_NOTIFY, notify);
    if (!found)
        return soft_bad_handle("notify", notify);
    pthread_mutex_lock(&found->lock);
    uint64_t key = found->key;
    pthread_mutex_unlock(&found->lock);
    if (key)
        soft_share_withdraw(key);
    soft_unref(&found->object);
    return ACL_SUCCESS;
}

/* ---- tasks ---- */

static aclError run_record(soft_task *task)
{
    eventfd_write(((notify_task *)task)->notify->fd, 1);
    return ACL_SUCCESS;
}

static aclError run_wait(soft_task *task)
{
    notify_task *wait = (notify_task *)task;
    eventfd_t count;
    int64_t end = soft_now_ns() / 1000000 + wait->timeout_ms;
    for (;;) {
        if (eventfd_read(wait->notify->fd, &count) == 0)    /* of several waiters one gets it */
            return ACL_SUCCESS;
        int64_t left = wait->timeout_ms ? end - soft_now_ns() / 1000000 : INT32_MAX;
        if (left <= 0)
            return soft_error(ACL_ERROR_RT_WAIT_TIMEOUT, "the notify was not recorded within %lld ms", (long long)wait->timeout_ms);
        if (soft_task_poll(task, wait->notify->fd, POLLIN, left < INT32_MAX ? (int)left : INT32_MAX) < 0)
            return ACL_SUCCESS;
    }
}

static void drop(soft_task *task)
{
    soft_unref(&((notify_task *)task)->notify->object);
    free(task);
}

static aclError submit(notify_task value, aclrtStream stream)             /* takes over one reference to the notify */
{
    soft_stream *on;
    aclError code = soft_stream_find(stream, &on);
    notify_task *made = code ? NULL : malloc(sizeof *made);
    if (made) {
        *made = value;
        code = soft_submit(on, &made->task);
    } else {
        soft_unref(&value.notify->object);
        code = code ? code : soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    }
    if (on)
        soft_stream_put(on);
    return code;
}

aclError aclrtRecordNotify(aclrtNotify notify, aclrtStream stream)
{
    notify_task value = { .task = { .function = __func__, .run = run_record, .drop = drop } };
    aclError code;
    SOFT_TRY(soft_fault(__func__, &value.task.fault));
    value.notify = get(notify, &code);
    return value.notify ? submit(value, stream) : code;
}

aclError aclrtWaitAndResetNotify(aclrtNotify notify, aclrtStream stream, uint32_t timeout)
{
    notify_task value = { .task = { .function = __func__, .run = run_wait, .drop = drop, .bytes = SOFT_MAY_BLOCK } };
    aclError code;
    SOFT_TRY(soft_fault(__func__, &value.task.fault));
    value.timeout_ms = timeout * 1000ll;                    /* this one call of all counts in seconds */
    value.notify = get(notify, &code);
    return value.notify ? submit(value, stream) : code;
}

/* ---- other processes ---- */

static aclError offer(soft_notify *notify, bool any_pid)    /* locked */
{
    soft_offer what = { SOFT_OFFER_NOTIFY, 0, 0, 0 };
    if (notify->imported)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "an imported notify cannot be exported again");
    return notify->key ? ACL_SUCCESS : soft_share_offer(&what, notify->fd, any_pid, &notify->key);
}

aclError aclrtNotifyGetExportKey(aclrtNotify notify, char *key, size_t len, uint64_t flags)
{
    aclError code;
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_key_check(key, len, flags, ACL_RT_NOTIFY_EXPORT_FLAG_DISABLE_PID_VALIDATION));
    SOFT_TRY(soft_context_need());
    soft_notify *found = get(notify, &code);
    if (!found)
        return code;
    pthread_mutex_lock(&found->lock);
    code = offer(found, flags & ACL_RT_NOTIFY_EXPORT_FLAG_DISABLE_PID_VALIDATION);
    if (code == ACL_SUCCESS)
        soft_key_print(found->key, key);
    pthread_mutex_unlock(&found->lock);
    soft_unref(&found->object);
    return code;
}

aclError aclrtNotifySetImportPid(aclrtNotify notify, int32_t *pid, size_t num)
{
    aclError code;
    SOFT_TRY(soft_fault(__func__, NULL));
    soft_notify *found = get(notify, &code);
    if (!found)
        return code;
    pthread_mutex_lock(&found->lock);
    code = found->key ? soft_share_allow(found->key, pid, num)
        : soft_error(ACL_ERROR_RT_PARAM_INVALID, "this notify has no export key yet");
    pthread_mutex_unlock(&found->lock);
    soft_unref(&found->object);
    return code;
}

/* Anything else would be ready for ever or block the reader: a stream would spin or hang on it. */
static aclError check_eventfd(int fd)
{
    char link[32], name[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    name[length < 0 ? 0 : length] = '\0';
    if (!strcmp(name, "anon_inode:[eventfd]") && fcntl(fd, F_GETFL) & O_NONBLOCK)
        return ACL_SUCCESS;
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "the peer sent something else than a notify");
}

aclError aclrtNotifyImportByKey(aclrtNotify *notify, const char *key, uint64_t flags)
{
    uint64_t parsed;
    soft_offer what;
    int fd;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!notify)
        return soft_null("notify");
    SOFT_TRY(soft_flags_check(flags, ACL_RT_NOTIFY_IMPORT_FLAG_ENABLE_PEER_ACCESS));
    SOFT_TRY(soft_key_parse(key, &parsed));
    SOFT_TRY(soft_context_need());
    SOFT_TRY(soft_share_fetch(parsed, SOFT_OFFER_NOTIFY, &what, &fd));
    aclError code = check_eventfd(fd);
    if (code) {
        close(fd);
        return code;
    }
    return new_notify(fd, true, notify);
}
