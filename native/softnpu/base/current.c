/* current.c: the table of the imitated devices, and the context that a thread has chosen.
 *
 * A thread remembers its context as a handle, looked up at every use: a context that was destroyed elsewhere is simply
 * not found. What a context and a device do with their streams is execution's: this file only says which they are.  */
#include "runtime.h"

static soft_device devices[SOFT_MAX_DEVICES];
static _Thread_local aclrtContext current;

/* ---- devices ---- */

void soft_devices_init(void)
{
    static bool made;                                       /* under aclInit's lock */
    for (int id = 0; !made && id < SOFT_MAX_DEVICES; id++) {
        devices[id].id = id;
        pthread_mutex_init(&devices[id].set_lock, NULL);
        pthread_mutex_init(&devices[id].lock, NULL);
    }
    made = true;
}

int soft_device_count(void)
{
    return soft_initialized() ? soft_setting.devices : 0;
}

soft_device *soft_device_of(int id)
{
    return id >= 0 && id < soft_device_count() ? &devices[id] : NULL;
}

aclError soft_device_check(int64_t id)
{
    if (!soft_initialized())
        return soft_error(ACL_ERROR_UNINITIALIZE, "aclInit has not been called");
    if (id < 0 || id >= soft_setting.devices)
        return soft_error(ACL_ERROR_RT_INVALID_DEVICEID, "device %lld: there are %d, from 0 (SOFTNPU_DEVICES)", (long long)id,
                          soft_setting.devices);
    return ACL_SUCCESS;
}

aclError soft_device_current(soft_device **device)
{
    soft_context *context;
    SOFT_TRY(soft_context_current(&context));
    *device = context->device;
    soft_unref(&context->object);
    return ACL_SUCCESS;
}

int soft_current_device(void)
{
    soft_context *context = soft_handle_get(SOFT_CONTEXT, soft_context_handle());
    if (!context)
        return -1;
    int id = context->device->id;
    soft_unref(&context->object);
    return id;
}

aclError soft_device_reserve(int id, uint64_t bytes)
{
    _Atomic uint64_t *used = &devices[id].used;
    uint64_t limit = atomic_load(&soft_setting.device_memory), now = atomic_load(used);
    do {
        uint64_t left = now < limit ? limit - now : 0;
        if (bytes > left)
            return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d: %llu bytes asked for, %llu free of %llu "
                              "(SOFTNPU_DEVICE_MEMORY)", id, (unsigned long long)bytes, (unsigned long long)left,
                              (unsigned long long)limit);
    } while (!atomic_compare_exchange_weak(used, &now, now + bytes));
    return ACL_SUCCESS;
}

void soft_device_unreserve(int id, uint64_t bytes)
{
    atomic_fetch_sub(&devices[id].used, bytes);
}

/* ---- contexts ---- */

aclrtContext soft_context_handle(void)
{
    return current;
}

void soft_context_bind(aclrtContext handle)
{
    current = handle;
}

aclError soft_context_current(soft_context **out)
{
    *out = current ? soft_handle_get(SOFT_CONTEXT, current) : NULL;
    if (!*out)
        return soft_error(ACL_ERROR_RT_CONTEXT_NULL, current ? "this thread's context was destroyed" : "this thread has no "
                          "context: call aclrtSetDevice or aclrtSetCurrentContext in it first");
    return ACL_SUCCESS;
}

aclError soft_context_need(void)
{
    soft_context *context;
    SOFT_TRY(soft_context_current(&context));
    soft_unref(&context->object);
    return ACL_SUCCESS;
}
