//! Keeps the KV blocks of other engines in the memory of this process: tests and figures run it as the second process.
//!
//!     kv-peer --model M --layout L --block-bytes N --blocks N [--listen ADDRESS] [--key-file FILE] [--nixl LIBRARY]
//!             [--mooncake COMMAND] [--offer N]
//!
//! Prints one line with its address, and ends when its standard input does. With `--offer`, it offers that many blocks
//! of its own in one offer, filled with a known pattern, and prints the offer's number after the address.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use meridian_core::file::read_regular;
use meridian_memory::fabric::mooncake::Mooncake;
use meridian_memory::fabric::nixl::Nixl;
use meridian_memory::fabric::{BlockHash, Fingerprint, Key, KvFabric, Node, NodeSettings, Offered};

const USAGE: &str = "usage: kv-peer --model M --layout L --block-bytes N --blocks N [--listen ADDRESS] \
                     [--key-file FILE] [--nixl LIBRARY] [--mooncake COMMAND] [--offer N]";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut settings = NodeSettings::new(Fingerprint::of(b""), Fingerprint::of(b""), 0);
    let (mut offered, mut arguments) = (0_u32, std::env::args().skip(1));
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("{name}: no value; {USAGE}"))?;
        let number = || value.parse::<u32>().map_err(|_| format!("{name}: {value:?}, expected a number"));
        match name.as_str() {
            "--model" => settings.model = Fingerprint::of(value.as_bytes()),
            "--layout" => settings.layout = Fingerprint::of(value.as_bytes()),
            "--block-bytes" => settings.block_bytes = number()?,
            "--blocks" => settings.shelf_blocks = number()?,
            "--offer" => offered = number()?,
            "--listen" => {
                let address = value.parse::<SocketAddr>();
                settings.listen = address.map_err(|_| format!("{name}: {value:?}, expected HOST:PORT"))?;
            }
            "--key-file" => {
                let secret = read_regular(Path::new(&value), 1 << 16).map_err(|error| format!("{value}: {error}"))?;
                let secret = secret.ok_or_else(|| format!("{value}: more than 64 KiB, expected a key"))?;
                settings.key = Some(Key::new(secret.trim_ascii()).map_err(|error| format!("{value}: {error}"))?);
            }
            "--nixl" => settings.path = Some(Nixl::open(Path::new(&value))?),
            "--mooncake" => {
                let words: Vec<String> = value.split_whitespace().map(str::to_owned).collect();
                settings.path = Some(Mooncake::start(&words)?);
            }
            _ => return Err(format!("{name}: no such option; {USAGE}").into()),
        }
    }
    let block_bytes = settings.block_bytes;
    let node = Node::start(settings)?;
    let mut line = node.address().to_string();
    if offered > 0 {
        let region = node.allocate(offered, block_bytes)?;
        let memory = node.register(&region)?;
        let mut blocks = Vec::new();
        for index in 0..offered {
            let mut block = region.write(index)?;
            for (place, byte) in block.iter_mut().enumerate() {
                *byte = (place as u32).wrapping_mul(31).wrapping_add(index) as u8;
            }
            blocks.push(Offered { index, hash: BlockHash::of(&index.to_le_bytes()) });
        }
        line += &format!(" {}", node.offer(memory, &blocks)?.0);
    }
    println!("{line}");
    std::io::stdout().flush()?;
    // Until the process that started it closes the pipe or ends.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
