/* socket_names.h: names under which processes of one machine find each other's sockets. */
#pragma once
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Makes the address of a name. Returns its length, or 0 if the folder's name leaves no room for it. */
socklen_t soft_socket_name(struct sockaddr_un *address, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Binds a socket of this type with bind(2). A file that an ended process left behind is replaced. */
int soft_socket_bind(int fd, const struct sockaddr_un *address, socklen_t length, int type);
