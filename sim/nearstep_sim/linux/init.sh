#!/bin/busybox sh
# The only process of the guest: looks at the card with Debian's tools, and trains on it.
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
export PATH=/bin LD_LIBRARY_PATH=/lib
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
cd /tmp

run() {
    echo "# $*"
    sh -c "$*" 2>&1
    status=$?
    [ $status = 0 ] || echo "FAILED with status $status: $*"
}

for wait in 1 2 3 4 5 6 7 8 9 10; do
    [ -e /dev/ng0n3 ] && break
    sleep 0.2
done
for path in /sys/class/nvme-generic/ng0n*; do
    space=$(echo $path/device/nvme0c0n*/nsid $path/device/nvme0n*/nsid)
    [ "$(nvme id-ns-descs /dev/${path##*/} 2>/dev/null | grep -c 'csi *: 4')" = 1 ] && programs=/dev/${path##*/}
done

echo "BEGIN"
run "uname -r"
run "nvme list"
run "nvme id-ns /dev/nvme0n1 | head -4"
run "nvme get-log $programs --log-id=0x82 --log-len=320 --namespace-id=3"
run "dd if=/dev/urandom of=some bs=4096 count=256"
run "dd if=some of=/dev/nvme0n1 bs=64k oflag=direct"
run "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/nvme0n1 of=back bs=64k count=16 iflag=direct"
run "cmp some back && echo equal"
run "nvme_adamw $(cat /arguments)"
run "sha256sum p m v"
run "grep nvme0 /proc/interrupts"
echo "END"
sync
poweroff -f
