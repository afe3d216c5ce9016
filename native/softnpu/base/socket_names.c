/* socket_names.c: the names under which processes of one machine find each other's sockets. They are abstract: no file is left,
 * and a name ends with its process. But each network namespace, and so each container, has its own abstract names. With
 * SOFTNPU_RENDEZVOUS the names are files in that folder, for processes that share nothing else. */
#include "socket_names.h"
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_file(const struct sockaddr_un *address)
{
    return address->sun_path[0] != 0;
}

socklen_t soft_socket_name(struct sockaddr_un *address, const char *format, ...)
{
    const char *folder = getenv("SOFTNPU_RENDEZVOUS");
    int start = 1;                                          /* the name starts after a NUL byte: that is what makes it abstract */
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    if (folder && *folder)
        start = snprintf(address->sun_path, sizeof address->sun_path, "%s/", folder);
    size_t room = start < (int)sizeof address->sun_path ? sizeof address->sun_path - (size_t)start : 0;
    va_list arguments;
    va_start(arguments, format);
    int length = room ? vsnprintf(address->sun_path + start, room, format, arguments) : 0;
    va_end(arguments);
    if (length <= 0 || (size_t)length >= room)
        return 0;                                           /* the folder's name is too long: bind and connect say EINVAL */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)(start + length + is_file(address)));
}

/* A file whose process has ended refuses; a socket whose queue is full does not. */
static bool is_left_behind(const struct sockaddr_un *address, socklen_t length, int type)
{
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool refused = fd >= 0 && connect(fd, (const struct sockaddr *)address, length) && errno == ECONNREFUSED;
    if (fd >= 0)
        close(fd);
    return refused;
}

int soft_socket_bind(int fd, const struct sockaddr_un *address, socklen_t length, int type)
{
    if (bind(fd, (const struct sockaddr *)address, length) == 0)
        return 0;
    if (errno != EADDRINUSE || !is_file(address) || !is_left_behind(address, length, type))
        return -1;
    unlink(address->sun_path);
    return bind(fd, (const struct sockaddr *)address, length);
}
