//! Local fault: why this process cannot send a request, caused by neither the payment nor the provider.
//!
//! Nothing was sent, and nothing is known about the provider. So the circuit breaker ignores it, and no attempt counts.
//! The text of each fault names its fix.

use std::io;

use super::wait_reason::{Wait, WaitReason};

/// Linux error numbers, for which the standard library has no stable names.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const ENOBUFS: i32 = 105;

/// A fault of this process, of its machine or of its set-up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocalFault {
    /// The process has reached its limit of open files and sockets.
    #[error(
        "this worker has used up its file descriptors: raise LimitNOFILE (systemd), the container's nofile \
         limit or `ulimit -n`"
    )]
    ProcessDescriptors,
    /// The machine has reached its limit of open files and sockets.
    #[error("this worker's machine has used up its file descriptors: raise the sysctl fs.file-max")]
    MachineDescriptors,
    /// The process has reached its limit of threads.
    #[error(
        "this worker may start no more threads: raise TasksMax (systemd), the container's pids limit or \
         `ulimit -u`"
    )]
    Threads,
    #[error("this worker's machine has no memory for another connection: give it more")]
    Memory,
    /// The machine has no address or port left to connect from.
    #[error(
        "this worker's machine has no address or port left to connect from: widen the sysctl \
         net.ipv4.ip_local_port_range, or set `reuse_connections`"
    )]
    Ports,
    /// The provider demands a client certificate in its TLS handshake. No request passes such a handshake.
    #[error(
        "the provider demands a client certificate, and Sluicegate has none: let url name an address without that \
         demand, or a proxy on this machine that has the certificate"
    )]
    ClientCertificate,
    /// Something that the request needs is missing here, such as a file with a secret. The text names it, never its
    /// content.
    #[error("the request cannot be built yet: {0}")]
    Unbuildable(String),
}

impl LocalFault {
    /// The wait of a job or a lane that meets the fault.
    pub fn wait(&self) -> Wait {
        match self {
            Self::Unbuildable(problem) => Wait::with_detail(WaitReason::Unbuildable, problem),
            Self::ClientCertificate => Wait::with_detail(WaitReason::Misconfigured, self.to_string()),
            _ => Wait::with_detail(WaitReason::LocalFault, self.to_string()),
        }
    }

    /// Whether the set-up of the provider row is at fault, and not the process or its machine.
    pub fn is_of_setup(&self) -> bool {
        matches!(self, Self::Unbuildable(_) | Self::ClientCertificate)
    }

    /// The local fault behind an I/O error, if there is one.
    pub fn from_io_error(error: &io::Error) -> Option<Self> {
        if let Some(wrapped) = error.get_ref() {
            // An I/O error does not list what it wraps among its sources.
            return wrapped.downcast_ref::<Self>().cloned();
        }
        match (error.raw_os_error(), error.kind()) {
            (Some(EMFILE), _) => Some(Self::ProcessDescriptors),
            (Some(ENFILE), _) => Some(Self::MachineDescriptors),
            (Some(ENOBUFS), _) | (_, io::ErrorKind::OutOfMemory) => Some(Self::Memory),
            (_, io::ErrorKind::AddrNotAvailable) => Some(Self::Ports),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhausted_resources_are_local_faults() {
        let os = io::Error::from_raw_os_error;
        let wrapped = io::Error::other(LocalFault::Threads);
        for (error, fault) in [
            (os(EMFILE), Some(LocalFault::ProcessDescriptors)),
            (os(ENFILE), Some(LocalFault::MachineDescriptors)),
            (os(ENOBUFS), Some(LocalFault::Memory)),
            (io::ErrorKind::OutOfMemory.into(), Some(LocalFault::Memory)),
            (io::ErrorKind::AddrNotAvailable.into(), Some(LocalFault::Ports)),
            (wrapped, Some(LocalFault::Threads)),
            (io::ErrorKind::ConnectionRefused.into(), None),
            (io::ErrorKind::TimedOut.into(), None),
            (io::Error::other("failed to lookup address information"), None),
        ] {
            assert_eq!(LocalFault::from_io_error(&error), fault, "{error:?}");
        }
    }

    #[test]
    fn a_fault_of_the_process_names_its_limit() {
        let text = LocalFault::ProcessDescriptors.to_string();
        assert!(["LimitNOFILE", "ulimit -n"].iter().all(|limit| text.contains(limit)), "{text}");
        let unbuildable = LocalFault::Unbuildable("header `authorization`: not found".to_owned()).to_string();
        assert_eq!(unbuildable, "the request cannot be built yet: header `authorization`: not found");
    }
}
