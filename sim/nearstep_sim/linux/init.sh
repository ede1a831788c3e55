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

ready() {
    for wait in $(seq 50); do
        [ "$(ls /dev/ng0n* 2>/dev/null | wc -l)" = 3 ] && return
        sleep 0.1
    done
}

python() {
    if mkdir /host 2>/dev/null; then
        mount -t virtiofs -o ro host /host
        for each in dev proc sys; do mount --bind /$each /host/$each; done
        mkdir -p /dev/shm
        mount -t tmpfs shm /dev/shm
    fi
    run "sh /python${1:+ $*}"
}

# Gives the function in a slot to vfio-pci.
vfio() {
    for each in $(cat /modules/order); do insmod /modules/$each.ko; done
    run "echo vfio-pci > /sys/bus/pci/devices/$1/driver_override"
    run "echo $1 > /sys/bus/pci/drivers_probe"
    run "ls /dev/vfio"
}

finish() {
    echo "END"
    sync
    poweroff -f
}

# Linux numbers namespaces in the order in which it has found them.
if grep -q 0x010802 /sys/bus/pci/devices/*/class; then
    ready
    drive=$(ls /dev/nvme0n*)
fi
echo "BEGIN"
[ ! -e /script ] || { . /script; finish; }
run "uname -r"
run "nvme list"
run "nvme id-ns $drive | head -4"
run "nvme id-iocs /dev/nvme0"
run "nvme get-log /dev/nvme0 --namespace-id=3 --log-id=0x82 --log-len=320"
run "dmesg | grep -o 'nvme nvme0: block.*'"
run "dd if=/dev/urandom of=some bs=64k count=16"
run "dd if=some of=$drive bs=64k oflag=direct conv=fsync"
run "dd if=$drive of=back bs=64k count=16 iflag=direct"
run "cmp some back && echo equal"
fio="fio --filename=$drive --direct=1 --rw=randwrite --verify=crc32c --size=4m"
fio="$fio --name=a --ioengine=psync --bs=4k --offset=4m"
fio="$fio --name=b --ioengine=io_uring --bs=16k --iodepth=8 --offset=8m"
fio="$fio --name=c --ioengine=io_uring --bsrange=4k-512k --iodepth=32 --offset=12m"
run "$fio > log && grep -o '[abc]: .*err= 0' log"
run "nvme_adamw $(cat /arguments)"
run "sha256sum p m v"
[ -f /python ] && python
run "grep nvme0 /proc/interrupts"
cd /sys/bus/pci/drivers/nvme
run "echo 0000:00:01.0 > unbind; ls /dev/ng0n* 2>/dev/null | wc -l"
run "echo 0000:00:01.0 > bind"
ready
run "ls /dev/ng0n* | wc -l"
cd /tmp
drive=$(ls /dev/nvme0n*)
run "dd if=$drive of=back bs=64k count=16 iflag=direct"
run "cmp some back && echo equal"
finish
