//! Names of fabrics, blocks, offers, models and layouts.

use std::fmt;

use ring::digest;

/// How the contents of blocks travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FabricKind {
    /// In the connection of the protocol.
    Tcp = 0,
    /// NVIDIA's NIXL, by its UCX backend.
    Nixl = 1,
    /// Mooncake's transfer engine.
    Mooncake = 2,
}

impl FabricKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Nixl, Self::Mooncake];

    /// Its name in configurations.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
        }
    }

    pub(crate) fn from_wire(kind: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known as u8 == kind)
    }
}

impl fmt::Display for FabricKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// The SHA-256 of a description.
///
/// ```
/// use meridian_memory::fabric::Fingerprint;
///
/// assert_eq!(Fingerprint::of(b"abc").to_string(), "ba7816bf8f01cfea");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Of these bytes.
    #[must_use]
    pub fn of(description: &[u8]) -> Self {
        let digest = digest::digest(&digest::SHA256, description);
        Self(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

/// The first 8 bytes in hexadecimal.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of a block's contents: the engine's hash of all tokens up to its end. Peers compare it and never compute it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// The SHA-256 of a name, for engines that name blocks otherwise.
    #[must_use]
    pub fn of(name: &[u8]) -> Self {
        Self(Fingerprint::of(name).0)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Fingerprint(self.0).fmt(f)
    }
}

/// A number that a node gives to an offer. It never comes again while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OfferId(pub u64);

/// The order of the bytes of a block. Two engines may exchange blocks only if all of it is equal.
///
/// ```
/// use meridian_memory::fabric::Layout;
///
/// let layout = Layout {
///     block_tokens: 16,
///     layers: 36,
///     kv_heads: 8,
///     head_size: 128,
///     element: "bfloat16".into(),
///     order: "layer, key or value, token, head".into(),
/// };
/// assert_eq!(layout.block_bytes(2), 16 * 36 * 8 * 128 * 2 * 2);
/// let other = Layout { element: "float16".into(), ..layout.clone() };
/// assert_ne!(layout.fingerprint(), other.fingerprint());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Layers of the model.
    pub layers: u32,
    /// Key-value heads of this process.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_size: u32,
    /// Type of an element.
    pub element: String,
    /// The dimensions in the order of memory, the slowest first.
    pub order: String,
}

impl Layout {
    /// The SHA-256 of the layout as text (ADR 0030).
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let Self { block_tokens, layers, kv_heads, head_size, element, order } = self;
        let text = format!(
            "MRDN layout 1\nblock_tokens={block_tokens}\nlayers={layers}\nkv_heads={kv_heads}\nhead_size={head_size}\n\
             element={element:?}\norder={order:?}\n"
        );
        Fingerprint::of(text.as_bytes())
    }

    /// Bytes of a block over all layers, keys and values.
    #[must_use]
    pub fn block_bytes(&self, element_bytes: u32) -> u64 {
        let Self { block_tokens, layers, kv_heads, head_size, .. } = self;
        [*block_tokens, *layers, *kv_heads, *head_size, element_bytes, 2]
            .into_iter()
            .fold(1, |bytes, factor| u64::saturating_mul(bytes, factor.into()))
    }
}
