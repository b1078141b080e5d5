"""The inverse of the noise: seeds for any required bits."""

MASK = (1 << 64) - 1


def unmix(value: int) -> int:
    """Invert SplitMix64's finaliser, to choose the 64 bits of a uniform."""

    def unshift(y: int, shift: int) -> int:
        x = y
        for _ in range(64 // shift):
            x = y ^ (x >> shift)
        return x

    value = unshift(value, 31)
    value = unshift(value * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK, 27)
    return unshift(value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK, 30)


def find_seed(bits: int) -> int:
    return (unmix(bits) - 0x9E3779B97F4A7C15) & MASK


def to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
