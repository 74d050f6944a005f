# A root of its own for the command behind "--": a small tmpfs with the folders and files named before, all read-only.
# Run by boundary.py in new namespaces: sh code_mounts.sh EMPTY_FOLDER PATH... -- COMMAND...
set -e
root=$1
shift
mount -t tmpfs -o size=1m,nr_inodes=4k,mode=755 none "$root"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; : > "$root$1"; fi
    mount -o bind,ro "$1" "$root$1"
    shift
done
mount -o remount,bind,ro "$root"
shift
exec chroot "$root" "$@"
