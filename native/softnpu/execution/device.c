/* device.c: the calls about a device as a whole. */
#include "runtime.h"
#include <stdlib.h>
#include <unistd.h>

aclError aclrtGetDeviceCount(uint32_t *count)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!count)
        return soft_null("count");
    SOFT_TRY(soft_device_check(0));
    *count = (uint32_t)soft_setting.devices;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *deviceId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!deviceId)
        return soft_null("deviceId");
    soft_device *device;
    SOFT_TRY(soft_device_current(&device));
    *deviceId = device->id;
    return ACL_SUCCESS;
}

static aclError synchronize(soft_device *device, int64_t timeout_ms)
{
    struct timespec deadline;
    soft_deadline(&deadline, timeout_ms);
    size_t count;
    soft_stream **streams = soft_device_streams(device, NULL, &count);
    aclError first = ACL_SUCCESS;
    for (size_t i = 0; i < count; i++) {
        aclError code = soft_queue_wait(streams[i], &deadline);
        first = first ? first : code;
        soft_stream_put(streams[i]);
    }
    free(streams);
    return first;
}

static aclError synchronize_current(int32_t timeout)
{
    if (timeout < -1)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "timeout %d: want milliseconds, or -1 for no limit", timeout);
    soft_device *device;
    SOFT_TRY(soft_device_current(&device));
    return synchronize(device, timeout);
}

aclError aclrtSynchronizeDevice(void)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return synchronize_current(-1);
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return soft_count_timeout(synchronize_current(timeout));
}

/* Ends the work of all streams; waits at most `timeout` ms (0: as long as it takes) until nothing of it can write. */
aclError aclrtDeviceTaskAbort(int32_t deviceId, uint32_t timeout)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_device_check(deviceId));
    soft_device *device = soft_device_of(deviceId);
    size_t count;
    soft_stream **streams = soft_device_streams(device, NULL, &count);
    for (size_t i = 0; i < count; i++) {
        soft_queue_abort(streams[i], ACL_ERROR_RT_DEVICE_TASK_ABORT);
        soft_stream_put(streams[i]);
    }
    free(streams);
    aclError code = synchronize(device, timeout ? (int64_t)timeout : -1);
    if (code == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)
        return soft_error(ACL_ERROR_RT_WAIT_TIMEOUT, "device %d: work still running %u ms after the abort", deviceId, timeout);
    return ACL_SUCCESS;
}

aclError aclrtQueryDeviceStatus(int32_t deviceId, aclrtDeviceStatus *deviceStatus)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!deviceStatus)
        return soft_null("deviceStatus");
    SOFT_TRY(soft_device_check(deviceId));
    *deviceStatus = ACL_RT_DEVICE_STATUS_NORMAL;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!value)
        return soft_null("value");
    SOFT_TRY(soft_device_check(deviceId));
    switch (attr) {
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = (int64_t)atomic_load(&soft_setting.device_memory); break;
    case ACL_DEV_ATTR_PHY_CHIP_ID:
    case ACL_DEV_ATTR_SUPER_POD_DEVIDE_ID:   *value = deviceId; break;
    case ACL_DEV_ATTR_SUPER_POD_SERVER_ID:   /* one machine is one server in one pod */
    case ACL_DEV_ATTR_SUPER_POD_ID:          *value = 0; break;
    default: return soft_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "device attribute %d: softnpu does not have it", (int)attr);
    }
    return ACL_SUCCESS;
}

/* User, logical and physical ids are one space here. */
static aclError same_id(int32_t id, int32_t *out, const char *name)
{
    if (!out)
        return soft_null(name);
    SOFT_TRY(soft_device_check(id));
    *out = id;
    return ACL_SUCCESS;
}

aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logicDevId, int32_t *const phyDevId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return same_id(logicDevId, phyDevId, "phyDevId");
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return same_id(userDevid, logicDevId, "logicDevId");
}

aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!canAccessPeer)
        return soft_null("canAccessPeer");
    SOFT_TRY(soft_device_check(deviceId));
    SOFT_TRY(soft_device_check(peerDeviceId));
    *canAccessPeer = deviceId != peerDeviceId;
    return ACL_SUCCESS;
}

static aclError check_peer(int32_t peer, soft_device **device)
{
    SOFT_TRY(soft_device_check(peer));
    SOFT_TRY(soft_device_current(device));
    if ((*device)->id == peer)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "device %d cannot be its own peer", peer);
    return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (flags)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "flags %#x: must be 0", flags);
    soft_device *device;
    SOFT_TRY(check_peer(peerDeviceId, &device));
    pthread_mutex_lock(&device->lock);
    device->peers |= 1ull << peerDeviceId;
    pthread_mutex_unlock(&device->lock);
    return ACL_SUCCESS;
}

aclError aclrtDeviceDisablePeerAccess(int32_t peerDeviceId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    soft_device *device;
    SOFT_TRY(check_peer(peerDeviceId, &device));
    pthread_mutex_lock(&device->lock);
    bool was = device->peers >> peerDeviceId & 1;
    device->peers &= ~(1ull << peerDeviceId);
    pthread_mutex_unlock(&device->lock);
    if (!was)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "device %d had no access to device %d", device->id, peerDeviceId);
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t *pid)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!pid)
        return soft_null("pid");
    *pid = getpid();
    return ACL_SUCCESS;
}
