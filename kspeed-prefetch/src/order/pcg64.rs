//! PCG XSL-RR 128/64 (O'Neill, "PCG: A Family of Simple Fast Space-Efficient
//! Statistically Good Algorithms for Random Number Generation", 2014), seeded
//! through numpy's `SeedSequence`: what `numpy.random.default_rng(seed)` is.

const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;

/// The generator.
#[derive(Clone)]
pub struct Pcg64 {
    state: u128,
    increment: u128,
    /// The high half of the last 64 bits, when only the low one was given out.
    half: Option<u32>,
}

impl Pcg64 {
    /// As `default_rng(seed)`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let w = seed_sequence(&super::words(seed));
        let pair = |i: usize| (u128::from(w[i]) << 64) | u128::from(w[i + 1]);
        let increment = (pair(2) << 1) | 1;
        let mut g = Self { state: 0, increment, half: None };
        g.step();
        g.state = g.state.wrapping_add(pair(0));
        g.step();
        g
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    fn next_u32(&mut self) -> u32 {
        if let Some(h) = self.half.take() {
            return h;
        }
        let v = self.next_u64();
        self.half = Some((v >> 32) as u32);
        v as u32
    }

    /// A number in `0..=most` by masked rejection, as numpy's shuffles draw it
    /// (`random_interval`; `Generator.integers` draws in another way).
    pub fn up_to(&mut self, most: u32) -> u32 {
        let Some(mask) = u32::MAX.checked_shr(most.leading_zeros()) else { return 0 };
        loop {
            let v = self.next_u32() & mask;
            if v <= most {
                return v;
            }
        }
    }
}

/// numpy's `SeedSequence(words).generate_state(4, uint64)`, after O'Neill's
/// `seed_seq_fe`; for entropy of at most four words.
fn seed_sequence(entropy: &[u32]) -> [u64; 4] {
    const POOL: usize = 4;
    let mut constant = 0x43b0_d7e5u32;
    let mut hash = |mut v: u32| {
        v ^= constant;
        constant = constant.wrapping_mul(0x931e_8875);
        v = v.wrapping_mul(constant);
        v ^ (v >> 16)
    };
    let mut pool = [0u32; POOL];
    for (i, p) in pool.iter_mut().enumerate() {
        *p = hash(entropy.get(i).copied().unwrap_or(0));
    }
    for from in 0..POOL {
        for to in 0..POOL {
            if from != to {
                let h = hash(pool[from]);
                let r = 0xca01_f9ddu32
                    .wrapping_mul(pool[to])
                    .wrapping_sub(0x4973_f715u32.wrapping_mul(h));
                pool[to] = r ^ (r >> 16);
            }
        }
    }
    let mut constant = 0x8b51_f9ddu32;
    let mut out = [0u64; 4];
    for i in 0..8 {
        let mut v = pool[i % POOL] ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        v = v.wrapping_mul(constant);
        v ^= v >> 16;
        out[i / 2] |= u64::from(v) << (32 * (i % 2));
    }
    out
}
