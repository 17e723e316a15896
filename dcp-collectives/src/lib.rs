#![doc = include_str!("../README.md")]

mod call;
mod deadline;
#[doc(hidden)]
pub mod fuzzing;
mod launch;
mod local;
pub mod mesh;
mod poison;
mod solo;
mod tcp;
mod tree;

pub use deadline::DEFAULT_DEADLINE;
pub use launch::{EnvError, Launch, Launcher, from_env_or_solo};
pub use local::{LocalCollective, LocalGroup};
pub use solo::Solo;
pub use tcp::{
    DEFAULT_CONNECT_TIMEOUT, DEFAULT_MAX_MESSAGE, Secret, SecretError, TcpCollective, TcpConfig,
};
#[cfg(feature = "tls")]
pub use tcp::{Tls, TlsError};
