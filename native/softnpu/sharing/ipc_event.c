/* ipc_event.c: events of other processes. The handle of 64 bytes holds a key; what is shared is a page of counters. */
#include "runtime.h"
#include <string.h>
#include <unistd.h>

/* One offer for an event, open to all processes of the user: the vendor's call has no list of process ids. */
static aclError offer(soft_event *event)
{
    soft_offer what = { SOFT_OFFER_EVENT, 0, 0, SOFT_PAGE };
    if (!event->shared)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "only an event made with ACL_EVENT_IPC (0x40) can be exported");
    if (event->imported)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "an imported event cannot be exported again");
    if (event->key)
        return ACL_SUCCESS;
    return soft_share_offer(&what, event->shared->fd, true, &event->key);
}

aclError aclrtIpcGetEventHandle(aclrtEvent event, aclrtIpcEventHandle *handle)
{
    aclError code;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!handle)
        return soft_null("handle");
    SOFT_TRY(soft_context_need());
    soft_event *found = soft_event_get(event, &code);
    if (!found)
        return code;
    pthread_mutex_lock(&found->lock);
    code = offer(found);
    uint64_t key = found->key;
    pthread_mutex_unlock(&found->lock);
    soft_unref(&found->object);
    if (code)
        return code;
    memset(handle, 0, sizeof *handle);
    soft_key_print(key, handle->reserved);
    return ACL_SUCCESS;
}

static aclError open_event(int fd, aclrtEvent *event)       /* takes the fd over */
{
    soft_shared_event *shared;
    SOFT_TRY(soft_shared_event_new(fd, &shared));
    aclError code = soft_event_new(ACL_EVENT_IPC, true, true, shared, event);
    if (code)
        soft_unref(&shared->object);
    return code;
}

aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent *event)
{
    uint64_t key;
    soft_offer what;
    int fd;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!event)
        return soft_null("event");
    handle.reserved[sizeof handle.reserved - 1] = '\0';
    SOFT_TRY(soft_key_parse(handle.reserved, &key));
    SOFT_TRY(soft_context_need());
    SOFT_TRY(soft_share_fetch(key, SOFT_OFFER_EVENT, &what, &fd));
    return open_event(fd, event);
}
