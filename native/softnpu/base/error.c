/* error.c: keeps each thread's last error for that thread. Reading it never fails on request (fault.c), so that the report of
 * another call can always be read. */
#include "runtime.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { TEXT_SIZE = 2048 };
typedef struct thread_errors {
    aclError last;
    char pending[TEXT_SIZE];                                /* newest first, one line each */
    char handed_out[TEXT_SIZE];                             /* what aclGetRecentErrMsg returned; valid until the next call */
    char *divert;                                           /* a task runs: its messages belong to its stream */
} thread_errors;
static _Thread_local thread_errors errors;

char *soft_error_divert(char *text)
{
    char *before = errors.divert;
    errors.divert = text;
    return before;
}

static void remember(const char *line)
{
    size_t length = strlen(line);
    if (length > TEXT_SIZE - 2)
        length = TEXT_SIZE - 2;
    size_t room = TEXT_SIZE - 1 - length - 1;               /* for older lines: the oldest fall off the end */
    size_t older = strnlen(errors.pending, room);
    memmove(errors.pending + length + 1, errors.pending, older);
    errors.pending[length + 1 + older] = '\0';
    memcpy(errors.pending, line, length);
    errors.pending[length] = older ? '\n' : '\0';
}

static void report(int code, const char *format, va_list values)
{
    if (errors.divert) {
        vsnprintf(errors.divert, SOFT_TEXT, format, values);
        return;
    }
    char line[512];
    int used = snprintf(line, sizeof line, "%d: ", code);
    vsnprintf(line + used, sizeof line - (size_t)used, format, values);
    remember(line);
}

aclError soft_error(aclError code, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    report(code, format, values);
    va_end(values);
    if (!errors.divert)
        errors.last = code;
    return code;
}

HcclResult soft_hccl_error(HcclResult code, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    report((int)code, format, values);
    va_end(values);
    return code;
}

aclError soft_null(const char *name)
{
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%s is NULL", name);
}

aclError soft_bad_handle(const char *what, const void *handle)
{
    return soft_error(ACL_ERROR_RT_INVALID_HANDLE, "%p is not a live %s", handle, what);
}

const char *aclGetRecentErrMsg(void)
{
    if (!errors.pending[0])
        return NULL;
    memcpy(errors.handed_out, errors.pending, sizeof errors.handed_out);
    errors.pending[0] = '\0';
    return errors.handed_out;
}

static aclError check_level(aclrtLastErrLevel level)
{
    if (level != ACL_RT_THREAD_LEVEL)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "error level %d: only ACL_RT_THREAD_LEVEL (0) exists", (int)level);
    return ACL_SUCCESS;
}

aclError aclrtGetLastError(aclrtLastErrLevel level)
{
    SOFT_TRY(check_level(level));
    aclError last = errors.last;
    errors.last = ACL_SUCCESS;
    return last;
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel level)
{
    SOFT_TRY(check_level(level));
    return errors.last;
}
