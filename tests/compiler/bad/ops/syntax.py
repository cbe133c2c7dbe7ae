def length(:
