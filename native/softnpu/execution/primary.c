/* primary.c: default contexts: aclrtSetDevice and aclrtResetDevice count who needs a device. */
#include "runtime.h"

static aclError set_device(soft_device *device)
{
    aclError code = ACL_SUCCESS;
    pthread_mutex_lock(&device->set_lock);                  /* contexts are made and ended one at a time */
    if (!device->primary)
        code = soft_context_new(device, true, &device->primary);
    if (code == ACL_SUCCESS) {
        device->refs++;
        soft_context_bind(device->primary->handle);
    }
    pthread_mutex_unlock(&device->set_lock);
    return code;
}

static aclError reset_device(soft_device *device, bool force)
{
    soft_context *ended = NULL;
    SOFT_TRY(soft_queue_outside());
    pthread_mutex_lock(&device->set_lock);
    bool was_set = device->refs > 0;
    if (was_set)
        device->refs = force ? 0 : device->refs - 1;
    if (was_set && !device->refs) {
        ended = device->primary;
        device->primary = NULL;
    }
    pthread_mutex_unlock(&device->set_lock);                /* not held while waiting for work: others may set the device again */
    if (!was_set)
        return soft_error(ACL_ERROR_RT_CONTEXT_NULL, "device %d is not set: there was an aclrtResetDevice for every aclrtSetDevice", device->id);
    if (ended)
        soft_context_close(ended, force);
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t deviceId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_device_check(deviceId));
    return set_device(soft_device_of(deviceId));
}

aclError aclrtResetDevice(int32_t deviceId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_device_check(deviceId));
    return reset_device(soft_device_of(deviceId), false);
}

/* All references at once, and the work in progress is aborted instead of awaited. */
aclError aclrtResetDeviceForce(int32_t deviceId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_device_check(deviceId));
    return reset_device(soft_device_of(deviceId), true);
}

static soft_context *any_context(soft_device *device)
{
    pthread_mutex_lock(&device->lock);
    soft_context *context = device->contexts;
    if (context)
        soft_ref(&context->object);
    pthread_mutex_unlock(&device->lock);
    return context;
}

void soft_devices_shutdown(void)
{
    for (int id = 0; id < soft_setting.devices; id++) {
        soft_device *device = soft_device_of(id);
        pthread_mutex_lock(&device->set_lock);
        soft_context *primary = device->primary;
        device->primary = NULL;
        device->refs = 0;
        pthread_mutex_unlock(&device->set_lock);
        if (primary)
            soft_context_close(primary, true);
        for (soft_context *context; (context = any_context(device)); )
            soft_context_close(context, true);
    }
}
