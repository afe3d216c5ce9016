/* Names of sockets: abstract, or files in a folder that several network namespaces share. */
#include <sys/stat.h>
#include "check.h"
#include "base/socket_names.c"                                /* softnpu does not export it */

static int listen_at(struct sockaddr_un *address, socklen_t length)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    if (soft_socket_bind(fd, address, length, SOCK_SEQPACKET) || listen(fd, 4)) {
        close(fd);
        return -1;
    }
    return fd;
}

TEST(test_a_name_is_abstract_and_taken_once)
{
    struct sockaddr_un address;
    unsetenv("SOFTNPU_RENDEZVOUS");
    socklen_t length = soft_socket_name(&address, "softnpu-test-%d", getpid());
    CHECK(length > 0 && address.sun_path[0] == 0);
    int fd = listen_at(&address, length);
    CHECK(fd >= 0);
    CHECK(listen_at(&address, length) < 0);
    close(fd);
    fd = listen_at(&address, length);
    CHECK(fd >= 0);                                         /* gone with its socket */
    close(fd);
}

TEST(test_a_file_is_taken_once_and_replaced_when_its_owner_is_gone)
{
    char folder[] = "/tmp/npuXXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    struct sockaddr_un address;
    struct stat file;
    setenv("SOFTNPU_RENDEZVOUS", folder, 1);
    socklen_t length = soft_socket_name(&address, "softnpu-test-%d", getpid());
    CHECK(length > 0 && strncmp(address.sun_path, folder, strlen(folder)) == 0);
    int fd = listen_at(&address, length);
    CHECK(fd >= 0);
    CHECK(listen_at(&address, length) < 0 && errno == EADDRINUSE);
    close(fd);
    CHECK(stat(address.sun_path, &file) == 0);              /* left behind */
    fd = listen_at(&address, length);
    CHECK(fd >= 0);
    int caller = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(connect(caller, (struct sockaddr *)&address, length) == 0);
    close(caller);
    close(fd);
    unlink(address.sun_path);
    rmdir(folder);
}

TEST(test_a_folder_whose_name_is_too_long_has_no_names)
{
    struct sockaddr_un address;
    char folder[200];
    memset(folder, 'x', sizeof folder - 1);
    folder[sizeof folder - 1] = 0;
    setenv("SOFTNPU_RENDEZVOUS", folder, 1);
    CHECK(soft_socket_name(&address, "softnpu-test") == 0);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(soft_socket_bind(fd, &address, 0, SOCK_SEQPACKET) && errno == EINVAL);
    close(fd);
}

int main(void)
{
    RUN(test_a_name_is_abstract_and_taken_once);
    RUN(test_a_file_is_taken_once_and_replaced_when_its_owner_is_gone);
    RUN(test_a_folder_whose_name_is_too_long_has_no_names);
    return check_done();
}
