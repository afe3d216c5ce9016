/* vmm_share.c: physical memory for other processes of this machine. Between machines there is nothing to share here: a
 * "fabric" handle works, too, but only as far as a plain one. */
#include "runtime.h"
#include <string.h>
#include <unistd.h>

static aclError offer(soft_physical *physical, bool any_pid)              /* locked */
{
    soft_offer what = { SOFT_OFFER_PHYSICAL, physical->placement, 0, physical->size };
    if (physical->imported)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "imported memory cannot be exported again");
    return physical->key ? ACL_SUCCESS : soft_share_offer(&what, physical->fd, any_pid, &physical->key);
}

static aclError export_handle(aclrtDrvMemHandle handle, uint64_t flags, uint64_t *key)
{
    aclError code;
    SOFT_TRY(soft_flags_check(flags, ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION));
    SOFT_TRY(soft_context_need());
    soft_physical *found = soft_physical_get(handle, &code);
    if (!found)
        return code;
    pthread_mutex_lock(&found->lock);
    code = offer(found, flags & ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION);
    *key = found->key;
    pthread_mutex_unlock(&found->lock);
    soft_unref(&found->object);
    return code;
}

static aclError import_handle(uint64_t key, int device, aclrtDrvMemHandle *handle)
{
    soft_offer what;
    int fd = -1;
    if (soft_key_pid(key) == getpid())
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "this process exported that handle itself; it is for other processes");
    SOFT_TRY(soft_share_fetch(key, SOFT_OFFER_PHYSICAL, &what, &fd));
    aclError code = soft_backing_check(fd, what.offset, what.size);
    if (code == ACL_SUCCESS)
        code = soft_physical_new((soft_physical){ .fd = fd, .device = device, .placement = what.placement, .size = what.size,
                                                  .imported = true }, handle);
    if (code)
        close(fd);
    return code;
}

/* ---- 64-bit handles ---- */

aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType handleType, uint64_t flags,
                                         uint64_t *shareableHandle)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!shareableHandle)
        return soft_null("shareableHandle");
    if (handleType != ACL_MEM_HANDLE_TYPE_NONE)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "handle type %d: only ACL_MEM_HANDLE_TYPE_NONE (0) exists", (int)handleType);
    return export_handle(handle, flags, shareableHandle);
}

aclError aclrtMemImportFromShareableHandle(uint64_t shareableHandle, int32_t deviceId, aclrtDrvMemHandle *handle)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!handle)
        return soft_null("handle");
    SOFT_TRY(soft_device_check(deviceId));
    SOFT_TRY(soft_context_need());
    return import_handle(shareableHandle, deviceId, handle);
}

aclError aclrtMemSetPidToShareableHandle(uint64_t shareableHandle, int32_t *pid, size_t pidNum)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return soft_share_allow(shareableHandle, pid, pidNum);
}

/* ---- typed handles ---- */

static aclError check_typed(const void *shareable, aclrtMemSharedHandleType type)
{
    if (!shareable)
        return soft_null("shareableHandle");
    if (type != ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT && type != ACL_MEM_SHARE_HANDLE_TYPE_FABRIC)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "share type %d: want 1 (default) or 2 (fabric)", (int)type);
    return ACL_SUCCESS;
}

static aclError read_typed(const void *shareable, aclrtMemSharedHandleType type, uint64_t *key)
{
    aclrtMemFabricHandle fabric;
    SOFT_TRY(check_typed(shareable, type));
    if (type == ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT) {
        memcpy(key, shareable, sizeof *key);
        return ACL_SUCCESS;
    }
    memcpy(&fabric, shareable, sizeof fabric);
    fabric.data[sizeof fabric.data - 1] = 0;
    return soft_key_parse((const char *)fabric.data, key);
}

static void write_typed(void *shareable, aclrtMemSharedHandleType type, uint64_t key)
{
    aclrtMemFabricHandle fabric = { .data = { 0 } };
    soft_key_print(key, (char *)fabric.data);
    if (type == ACL_MEM_SHARE_HANDLE_TYPE_FABRIC)
        memcpy(shareable, &fabric, sizeof fabric);
    else
        memcpy(shareable, &key, sizeof key);
}

aclError aclrtMemExportToShareableHandleV2(aclrtDrvMemHandle handle, uint64_t flags, aclrtMemSharedHandleType shareType,
                                           void *shareableHandle)
{
    uint64_t key;
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(check_typed(shareableHandle, shareType));
    SOFT_TRY(export_handle(handle, flags, &key));
    write_typed(shareableHandle, shareType, key);
    return ACL_SUCCESS;
}

aclError aclrtMemImportFromShareableHandleV2(void *shareableHandle, aclrtMemSharedHandleType shareType, uint64_t flags,
                                             aclrtDrvMemHandle *handle)
{
    uint64_t key;
    soft_device *device;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!handle)
        return soft_null("handle");
    SOFT_TRY(soft_flags_check(flags, 0));
    SOFT_TRY(read_typed(shareableHandle, shareType, &key));
    SOFT_TRY(soft_device_current(&device));
    return import_handle(key, device->id, handle);
}

aclError aclrtMemSetPidToShareableHandleV2(void *shareableHandle, aclrtMemSharedHandleType shareType, int32_t *pid, size_t pidNum)
{
    uint64_t key;
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(read_typed(shareableHandle, shareType, &key));
    return soft_share_allow(key, pid, pidNum);
}
