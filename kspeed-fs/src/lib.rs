//! KSpeed's file system: names, handles, FUSE, commands.
//!
//! Dependencies go downward: `cli` → `mount` (the composition root) → `control`,
//! `fuse` → `fs` → `pipeline` → `dataset` → `namespace`, `push`.

pub mod cli;
pub mod config;
pub mod control;
pub mod dataset;
pub mod doctor;
pub mod errno;
pub mod fs;
pub mod fuse;
pub mod mount;
pub mod namespace;
pub mod pipeline;
pub mod push;
pub mod telemetry;
pub mod writeback;
